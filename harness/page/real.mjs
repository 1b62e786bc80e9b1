// The pages as the executable serves them, with the bundled model.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createServer } from "node:net";
import { check, eventually, lastReply, open, screenshot, send } from "./browser.mjs";
import { pageFile, WAIT_MS } from "./stub.mjs";

async function freePort() {
  const free = createServer();
  await new Promise((done) => free.listen(0, "127.0.0.1", done));
  const { port } = free.address();
  await new Promise((done) => free.close(done));
  return port;
}

async function serve(hearth, ...flags) {
  // Another program may take the port between the two.
  for (let tries = 0; tries < 3; tries++) {
    const port = await freePort();
    const fixed = ["serve", "--port", port, "--max-ctx", "4096", "--log", "error", "--status-page"];
    const server = spawn(hearth, [...fixed, ...flags], { stdio: "inherit" });
    const until = performance.now() + WAIT_MS;
    while (server.exitCode === null && performance.now() < until) {
      const health = await fetch(`http://127.0.0.1:${port}/health`).catch(() => null);
      if (health?.ok) return { server, url: `http://127.0.0.1:${port}/` };
      await new Promise((later) => setTimeout(later, 200));
    }
    server.kill();
  }
  throw new Error("the server did not start");
}

export async function test(browser, hearth) {
  const { server, url } = await serve(hearth, "--ddtree-cost-stop", "off");
  try {
    const answer = await fetch(url, { headers: { accept: "text/html" } });
    check("the executable has the committed page", (await answer.text()) === pageFile("index.html") && answer.headers.get("content-security-policy") === pageFile("index.csp").trim());
    const known = await fetch(url, { headers: { accept: "text/html", "if-none-match": answer.headers.get("etag") } });
    check("a known page is not sent again", known.status === 304);
    await chat(browser, url);
  } finally {
    server.kill();
  }
  const keyed = await serve(hearth, "--api-key", "secret");
  try {
    await withKey(browser, keyed.url);
  } finally {
    keyed.server.kill();
  }
}

async function chat(browser, url) {
  const { page, faults, context } = await open(browser, url);
  // The same replies at each run, and none that goes on until the context is full.
  await page.evaluate(() => localStorage.setItem("hearth.settings", JSON.stringify({ temperature: 0, maxTokens: 300 })));
  await page.reload();
  await page.locator("#model", { hasText: "ember" }).waitFor();
  await send(page, "What is 23 + 45?");
  await lastReply(page).locator(".figures").waitFor();
  check("the bundled model's reply is right", (await lastReply(page).locator(".markdown").textContent()).includes("68"));
  const said = await lastReply(page).locator(".figures summary").textContent();
  check(`its figures: ${said}`, /\d+ tokens · [\d.]+ per second · \d+ % of guesses right/.test(said));
  check("it thought first", /Thought/.test(await lastReply(page).locator(".thinking summary").textContent()));
  // Long enough to be worth keeping.
  const notes = Array.from({ length: 120 }, (_, at) => `Note ${at}: the box is blue.`).join("\n");
  await page.locator("#composer input[type=file]").setInputFiles({ name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from(notes) });
  for (const [at, question] of ["What is in the notes?", "What is 12 + 30?"].entries()) {
    await send(page, question);
    await page.locator("article.assistant").nth(at + 1).locator(".figures").waitFor();
  }
  check("the prompt was remembered in part", (await lastReply(page).locator(".figures summary").textContent()).includes("of the prompt remembered"));
  await screenshot(page, "real");
  const status = await context.newPage();
  await status.goto(`${url}status`);
  await status.getByText("Guesses right").waitFor();
  // One request behind the other, each read to its end, until the page has shown one.
  const leave = new AbortController();
  const body = JSON.stringify({ prompt: "Once", max_tokens: 1000, ignore_eos: true, stream: true });
  const asking = async () => {
    while (!leave.signal.aborted) {
      const answer = await fetch(`${url}v1/completions`, { method: "POST", headers: { "content-type": "application/json" }, body, signal: leave.signal });
      assert.equal(answer.status, 200);
      await answer.text();
    }
  };
  const asked = asking().catch((thrown) => assert.ok(leave.signal.aborted, String(thrown)));
  await Promise.race([asked, status.locator("tbody tr", { hasText: /reads|writes|waits/ }).waitFor()]);
  await screenshot(status, "real-status");
  console.log("ok the status page shows a request while it runs");
  leave.abort();
  await asked;
  await send(page, "Write a Python function that reverses a list.");
  await page.getByRole("button", { name: "Stop the reply" }).click({ timeout: 5000 }).catch(() => undefined);
  await eventually("no request is left", async () => (await (await fetch(`${url}status/json`)).json()).slots.requests_running === 0);
  assert.deepEqual(faults, []);
  await context.close();
}

async function withKey(browser, url) {
  const { page, context } = await open(browser, `${url}#key=secret`);
  await page.locator("#model", { hasText: "ember" }).waitFor();
  await send(page, "What is 1 + 1?");
  await lastReply(page).locator(".figures").waitFor();
  await page.goto(`${url}status`);
  await page.getByText("Live", { exact: true }).waitFor();
  console.log("ok with a key both pages open");
  await context.close();
}
