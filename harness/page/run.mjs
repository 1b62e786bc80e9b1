// Tests the chat page in headless Chromium: streaming, the stop button, folded reasoning, speed, acceptance,
// and that it contacts no other host.
//
//   apt-get install chromium                      (Debian; tested with 156.0.8078.108)
//   python3 harness/clients/install.py browser    (playwright-core, pinned)
//   node harness/page/run.mjs [target/release/hearth] [/usr/bin/chromium]
//
// The first server replays a script slowly (`hearth serve --script`), so intermediate states do not depend on
// the machine's speed. The second server runs the bundled model with its draft. Prints one line per check and
// exits 1 at the first failure. Screenshots: target/harness/out/page-*.png.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:net";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const installed = join(root, "target/harness");
const hearth = resolve(process.argv[2] ?? join(root, "target/release/hearth"));
const browserPath = process.argv[3] ?? "/usr/bin/chromium";
const { chromium } = createRequire(join(installed, "browser/package.json"))("playwright-core");
const out = join(installed, "out");
mkdirSync(out, { recursive: true });

const words = Array.from({ length: 120 }, (_, at) => `word${at}`).join(" ");
const SCRIPT = [
  { step_ms: 25 },
  { last: "long story", say: words },
  { last: "sum", think: "Twenty-three and forty-five make sixty-eight.", say: "23 + 45 = **68** 👍🏽 日本" },
  { last: "markup", say: "<img src=x onerror=\"document.title='broken'\"> & <b>bold</b>" },
];

function check(name, passed) {
  assert.ok(passed, name);
  console.log(`ok ${name}`);
}

async function serve(...flags) {
  const port = await new Promise((done) => {
    const free = createServer().listen(0, "127.0.0.1", () => {
      const { port } = free.address();
      free.close(() => done(port));
    });
  });
  const fixed = ["serve", "--port", port, "--max-ctx", "4096", "--log", "warn"];
  const server = spawn(hearth, [...fixed, ...flags], { stdio: "inherit" });
  for (let tries = 0; tries < 600; tries++) {
    const health = await fetch(`http://127.0.0.1:${port}/health`).catch(() => null);
    if (health?.ok) return { server, url: `http://127.0.0.1:${port}/` };
    await new Promise((later) => setTimeout(later, 100));
  }
  throw new Error("the server did not start");
}

/** Opens the page in a tab; `faults` collects requests to other hosts and errors. */
async function open(browser, url) {
  const page = await browser.newPage({ viewport: { width: 900, height: 640 } });
  const faults = [];
  page.on("request", (request) => {
    const target = new URL(request.url());
    if (target.protocol !== "data:" && target.origin !== new URL(url).origin) faults.push(request.url());
  });
  page.on("pageerror", (error) => faults.push(String(error)));
  await page.goto(url);
  await page.locator("#model", { hasText: "tokens of context" }).waitFor();
  return { page, faults };
}

const last = (page) => page.locator("article.assistant").last();

async function send(page, text) {
  await page.locator("#text").fill(text);
  await page.locator("#text").press("Enter");
}

/** Waits until the last reply has more than `length` characters. */
async function textLongerThan(page, length) {
  const isLonger = (length) => {
    const text = document.querySelector("article.assistant:last-of-type .text");
    return text.textContent.length > length;
  };
  await page.waitForFunction(isLonger, length);
}

async function scripted(browser) {
  const script = join(out, "page.jsonl");
  writeFileSync(script, SCRIPT.map((line) => JSON.stringify(line)).join("\n"));
  const { server, url } = await serve("--script", script);
  try {
    const { page, faults } = await open(browser, url);
    await send(page, "Tell a long story.");
    await page.locator("#stop").waitFor();
    const canSend = await page.locator("#send").isVisible();
    check("during generation, a stop button replaces the send button", !canSend);
    const text = last(page).locator(".text");
    await textLongerThan(page, 20);
    const early = (await text.textContent()).length;
    await textLongerThan(page, early);
    check("the reply grows on the page", early < words.length);
    await page.locator("#stop").click();
    await last(page).locator(".counts", { hasText: "stopped" }).waitFor();
    const stopped = await text.textContent();
    await page.waitForTimeout(700);
    const unchanged = (await text.textContent()) === stopped;
    check("stop ends the reply and keeps its text", unchanged && words.startsWith(stopped));
    const slots = await (await fetch(`${url}slots`)).json();
    check("the server stopped the request too", slots.sequences === 0 && slots.requests_running === 0);
    check("the send button is back", await page.locator("#send").isVisible());

    await page.locator("#think").selectOption("on");
    await send(page, "A sum, please.");
    await last(page).locator(".counts", { hasText: "tok/s" }).waitFor();
    const fold = last(page).locator("details");
    const isOpen = await fold.evaluate((node) => node.open);
    check("reasoning is folded", !isOpen && !(await fold.locator("pre").isVisible()));
    await fold.locator("summary").click();
    const reasoning = await fold.locator("pre").textContent();
    check("reasoning can be unfolded", reasoning.includes("make sixty-eight"));
    const reply = await last(page).locator(".text").textContent();
    check("the text is complete", reply.trim() === "23 + 45 = **68** 👍🏽 日本");
    const counts = await last(page).locator(".counts").textContent();
    check("the speed is shown", /\d+ tokens · [\d.]+ tok\/s/.test(counts));

    await send(page, "Some markup.");
    await last(page).locator(".counts").waitFor();
    const images = await page.locator("#log img").count();
    check("markup in a reply is shown as text", (await page.title()) === "Hearth" && images === 0);
    await page.screenshot({ path: join(out, "page-scripted.png") });
    await page.locator("#clear").click();
    check("a new chat is empty", (await page.locator("article").count()) === 0);
    assert.deepEqual(faults, []);
    console.log("ok no request to another host, no error");
  } finally {
    server.kill();
  }
}

async function bundled(browser) {
  const { server, url } = await serve("--ddtree-cost-stop", "off");
  try {
    const { page, faults } = await open(browser, url);
    await send(page, "What is 23 + 45?");
    await last(page).locator(".counts", { hasText: "tok/s" }).waitFor();
    const counts = await last(page).locator(".counts").textContent();
    check(`acceptance is shown: ${counts}`, /\d+ % of drafts accepted/.test(counts));
    const reply = await last(page).locator(".text").textContent();
    check("the bundled model's reply is right", reply.includes("68"));
    await page.screenshot({ path: join(out, "page-bundled.png") });
    assert.deepEqual(faults, []);
  } finally {
    server.kill();
  }
}

const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox"] });
try {
  console.log(`Chromium ${browser.version()}`);
  await scripted(browser);
  await bundled(browser);
} finally {
  await browser.close();
}
console.log(`screenshots: ${join(out, "page-scripted.png")}, ${join(out, "page-bundled.png")}`);
