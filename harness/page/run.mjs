// Tests the chat page and the status page in headless Chromium, with a mouse and a keyboard.
//
//   python3 harness/clients/install.py browser      (playwright-core and axe-core, pinned)
//   node harness/page/run.mjs [HEARTH] [--browser PATH] [--only PART]
//
// Most parts talk to `stub.mjs`, which holds every state as long as a test looks at it. The last part runs HEARTH
// (target/debug/hearth unless named) with the bundled model; without the file it is skipped, and says so.
// Chromium: Debian's package `chromium`, which a run as root installs by itself. Without it all is skipped, loudly.
// Prints one line a check and exits 1 at the first failure. Screenshots: target/harness/out/page-*.png.

import { spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { launch, root } from "./browser.mjs";
import { startStub } from "./stub.mjs";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { browser: { type: "string" }, only: { type: "string" } },
});
const hearth = resolve(positionals[0] ?? join(root, "target/debug/hearth"));
const KNOWN = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const PARTS = ["chat", "branches", "keeping", "leaving", "settings", "faults", "hostile", "access", "status", "real"];

function skip(what, why) {
  console.error(`SKIPPED: ${what}, because ${why}`);
}

/** The browser's path; Debian's package is installed if that is possible. */
async function findBrowser() {
  const found = () => [values.browser, ...KNOWN].find((path) => path && existsSync(path));
  for (let tries = 0; tries < 3 && !found() && process.getuid?.() === 0; tries++) {
    console.log("installing Debian's chromium");
    const get = (...wanted) => spawnSync("apt-get", ["-qq", ...wanted], { stdio: ["ignore", "ignore", "inherit"] });
    // The lists may be missing or older than the packages, and the archive out of reach for a moment.
    if (tries > 0) await new Promise((later) => setTimeout(later, 10_000));
    if (tries > 0) get("update");
    get("install", "-y", "chromium");
  }
  return found();
}

const path = await findBrowser();
const browser = path && (await launch(path));
if (!browser) {
  skip("the pages are NOT tested in a browser", "there is no Chromium; install the package chromium or pass --browser");
  process.exit(0);
}
console.log(`Chromium ${browser.version()}`);
try {
  for (const part of values.only ? [values.only] : PARTS) {
    if (part === "real" && !existsSync(hearth)) {
      skip("the page is NOT tested with a real server", `${hearth} does not exist`);
      continue;
    }
    console.log(`-- ${part}`);
    const { test } = await import(`./${part}.mjs`);
    const stub = part === "real" ? hearth : await startStub();
    try {
      await test(browser, stub);
    } finally {
      stub.close?.();
    }
  }
} finally {
  await browser.close();
}
console.log("all checks passed; screenshots in target/harness/out");
