// The browser of the tests: Debian's Chromium, driven by playwright-core, with axe-core for the checks of access.

import assert from "node:assert/strict";
import { existsSync, mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

export const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const installed = join(root, "target/harness");
export const out = join(installed, "out");
mkdirSync(out, { recursive: true });
const require = createRequire(join(installed, "browser/package.json"));

export function check(name, passed) {
  assert.ok(passed, name);
  console.log(`ok ${name}`);
}

export async function launch(path) {
  if (!existsSync(path)) return null;
  const { chromium } = require("playwright-core");
  return chromium.launch({ executablePath: path, args: ["--no-sandbox"] });
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
  context.setDefaultTimeout(8000);
  await page.goto(url);
  return { page, faults, context };
}

export const screenshot = (page, name) => page.screenshot({ path: join(out, `page-${name}.png`) });

/** Fails with the list of violations, if there are any. */
export async function checkAccess(page, name) {
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
