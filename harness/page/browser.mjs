// The browser of the tests: Debian's Chromium, driven by playwright-core, with axe-core for the checks of access.

import assert from "node:assert/strict";
import { existsSync, mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { WAIT_MS } from "./stub.mjs";

export const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const installed = join(root, "target/harness");
export const out = join(installed, "out");
mkdirSync(out, { recursive: true });
const require = createRequire(join(installed, "browser/package.json"));

export function check(name, passed) {
  assert.ok(passed, name);
  console.log(`ok ${name}`);
}

/** For what comes by itself a moment later: asks until `isSo` gives true. */
export async function eventually(name, isSo) {
  const until = performance.now() + WAIT_MS;
  while (!(await isSo())) {
    assert.ok(performance.now() < until, name);
    await new Promise((later) => setTimeout(later, 50));
  }
  console.log(`ok ${name}`);
}

/** How many times longer than alone a calculation takes, because other programs use the machine. */
export function slowness() {
  const [begun, used] = [performance.now(), process.cpuUsage()];
  while (process.cpuUsage(used).user < 200_000);
  const { user, system } = process.cpuUsage(used);
  return Math.max(1, ((performance.now() - begun) * 1000) / (user + system));
}

/** The time between frames while `work` runs, in ms. */
export async function frames(page, work) {
  await page.evaluate(() => {
    window.gaps = [];
    let last = performance.now();
    const tick = () => {
      window.gaps.push(performance.now() - last);
      last = performance.now();
      window.ticking = requestAnimationFrame(tick);
    };
    tick();
  });
  await work();
  const gaps = await page.evaluate(() => {
    cancelAnimationFrame(window.ticking);
    return window.gaps.sort((a, b) => a - b);
  });
  return { middle: gaps[gaps.length >> 1], worst: gaps.at(-1) };
}

/** Time that the page's own thread has used, in ms; what other programs use is not in it. */
export async function threadTime(page) {
  const tools = await page.context().newCDPSession(page);
  await tools.send("Performance.enable", { timeDomain: "threadTicks" });
  const read = async () => {
    const { metrics } = await tools.send("Performance.getMetrics");
    return metrics.find(({ name }) => name === "TaskDuration").value * 1000;
  };
  const before = await read();
  return async () => Math.round((await read()) - before);
}

export async function launch(path) {
  if (!existsSync(path)) return null;
  const { chromium } = require("playwright-core");
  return chromium.launch({ executablePath: path, args: ["--no-sandbox", "--disable-dev-shm-usage"], timeout: WAIT_MS });
}

export const VIEWS = {
  light: { viewport: { width: 1180, height: 800 }, colorScheme: "light" },
  dark: { viewport: { width: 1180, height: 800 }, colorScheme: "dark" },
  phone: { viewport: { width: 390, height: 780 }, colorScheme: "light", hasTouch: true, isMobile: true },
};

/** Opens a page in a browser profile of its own; `faults` collects errors, refusals by the policy and foreign requests. */
export async function open(browser, url, view = VIEWS.light) {
  const context = await browser.newContext({ ...view, reducedMotion: "reduce", permissions: ["clipboard-read", "clipboard-write"] });
  const page = await context.newPage();
  const faults = [];
  page.on("request", (request) => {
    const target = new URL(request.url());
    if (!["data:", "blob:"].includes(target.protocol) && target.origin !== new URL(url).origin) faults.push(request.url());
  });
  page.on("pageerror", (error) => faults.push(String(error.stack ?? error)));
  page.on("console", (message) => {
    // The browser itself reports refused requests, which are part of the tests.
    if (message.type() === "error" && !message.text().startsWith("Failed to load resource")) faults.push(message.text());
  });
  page.on("dialog", (dialog) => {
    faults.push(`a dialog: ${dialog.message()}`);
    void dialog.dismiss();
  });
  context.setDefaultTimeout(WAIT_MS);
  await page.goto(url);
  return { page, faults, context };
}

export const screenshot = (page, name) => page.screenshot({ path: join(out, `page-${name}.png`) });

/** Fails with the list of violations, if there are any. */
export async function checkAccess(page, name) {
  // Colours count once they stand still.
  await page.evaluate(() => Promise.all(document.getAnimations().map((one) => (one.effect.getComputedTiming().endTime === Infinity ? null : one.finished.catch(() => null)))));
  // The policy of the page lets no script in; the protocol of the browser's tools does.
  await page.evaluate(readFileSync(require.resolve("axe-core/axe.min.js"), "utf8"));
  const violations = await page.evaluate(async () => {
    const { violations } = await window.axe.run(document, {
      runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    });
    return violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`);
  });
  assert.deepEqual(violations, [], name);
  console.log(`ok axe finds nothing: ${name}`);
}

export const replies = (page) => page.locator("article.assistant");
export const lastReply = (page) => replies(page).last();

export async function send(page, text) {
  await page.locator("#text").fill(text);
  await page.locator("#text").press("Enter");
}
