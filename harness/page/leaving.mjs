// A page that is reloaded, closed or crashes directly behind a change loses nothing, even if its database is slow.

import assert from "node:assert/strict";
import { check, lastReply, open, send } from "./browser.mjs";

/** In the page: nothing that it writes to IndexedDB comes to its end while the tab's session says so. */
function holdWrites() {
  const begin = IDBDatabase.prototype.transaction;
  IDBDatabase.prototype.transaction = function (...wanted) {
    const change = begin.apply(this, wanted);
    if (wanted[1] === "readwrite" && sessionStorage.getItem("held")) {
      const store = change.objectStore(change.objectStoreNames[0]);
      const readOn = () => (store.count().onsuccess = readOn);
      readOn();
      change.commit = () => {};
    }
    return change;
  };
}

const hold = (page) => page.evaluate(() => sessionStorage.setItem("held", "yes"));

/** Reloads behind `change`, which runs in the page, before anything else can run there. */
const changeAndReload = (page, change) =>
  Promise.all([
    page.waitForEvent("load"),
    page.evaluate((source) => {
      (0, eval)(`(${source})`)();
      sessionStorage.removeItem("held");
      location.reload();
    }, String(change)),
  ]);

const submit = () => document.getElementById("composer").requestSubmit();
const stop = () => document.getElementById("stop").click();
const nothing = () => {};

/** The request for an answer to `text`; one that a reload has cut may be there or not. */
async function replyTo(stub, text) {
  for (;;) {
    const reply = await stub.next();
    if (reply.body.messages.at(-1).content === text) return reply;
  }
}

const kept = (page) => page.evaluate(() => Object.keys(localStorage).filter((key) => key.startsWith("hearth.unsaved.")));

export async function test(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  await page.addInitScript(holdWrites);
  await page.reload();
  for (const held of [false, true]) {
    const name = held ? "that storage has not confirmed" : "in the same turn as a reload";
    if (held) await hold(page);
    await page.locator("#text").fill(`question ${held}`);
    await changeAndReload(page, submit);
    await page.locator(".bubble", { hasText: `question ${held}` }).waitFor();
    check(`a message ${name} is kept`, await lastReply(page).getByText("You stopped this reply.").isVisible());

    if (held) await hold(page);
    await send(page, `more ${held}`);
    const stopped = await replyTo(stub, `more ${held}`);
    stopped.say(`half ${held}`);
    await page.getByText(`half ${held}`).waitFor();
    await changeAndReload(page, stop);
    await page.getByText(`half ${held}`).waitFor();
    check(`the end of a reply ${name} is kept`, await lastReply(page).getByText("You stopped this reply.").isVisible());
  }
  await hold(page);
  await send(page, "a third");
  const failed = await stub.next();
  failed.say("begun");
  failed.fail({ message: "it broke" });
  await lastReply(page).getByText("It broke.").waitFor();
  await changeAndReload(page, nothing);
  await lastReply(page).getByText("It broke.").waitFor();
  check("a fault that storage has not confirmed is kept", await page.getByText("begun").isVisible());
  await page.waitForFunction(() => !Object.keys(localStorage).some((key) => key.startsWith("hearth.unsaved.")));
  await page.reload();
  await lastReply(page).getByText("It broke.").waitFor();
  console.log("ok what the journal kept is in storage, and the journal is empty");
  await olderVersions(page);
  await otherTabs(page, stub);
  await crash(page, stub);
  assert.deepEqual(faults, []);
  await context.close();
}

/** A version that was left over does not replace a newer one, and what cannot be read does no harm. */
async function olderVersions(page) {
  const id = new URLSearchParams(new URL(page.url()).hash.slice(1)).get("chat");
  await page.evaluate((id) => {
    const old = { id, title: "an old one", named: true, created: 1, updated: 1, system: "", messages: {}, chosen: {} };
    localStorage.setItem(`hearth.unsaved.${id}.gone`, JSON.stringify(old));
    localStorage.setItem("hearth.unsaved.broken.gone", "{");
  }, id);
  await page.reload();
  await lastReply(page).getByText("It broke.").waitFor();
  check("an older version is left out", (await page.getByText("an old one").count()) === 0);
  assert.deepEqual(await kept(page), []);
}

/** Two tabs with changes that storage has not confirmed: one is closed, one is reloaded. */
async function otherTabs(page, stub) {
  const other = await page.context().newPage();
  await other.addInitScript(holdWrites);
  await other.goto(stub.url);
  for (const [tab, text] of [[page, "from the first tab"], [other, "from the second tab"]]) {
    await hold(tab);
    await send(tab, text);
    const reply = await stub.next();
    reply.say(`an answer ${text}`);
    reply.end();
    await lastReply(tab).getByText(`an answer ${text}`).waitFor();
    await lastReply(tab).locator(".figures").waitFor();
  }
  await other.close({ runBeforeUnload: true });
  await changeAndReload(page, nothing);
  await page.getByText("an answer from the first tab").waitFor();
  await page.locator("#sidebar .title", { hasText: "from the second tab" }).click();
  await page.getByText("an answer from the second tab").waitFor();
  assert.deepEqual(await kept(page), []);
  console.log("ok two tabs keep what storage has not confirmed, each its own");
}

/** A tab that crashes cannot do anything any more: what it has shown as ended is stored by then, or on its way. */
async function crash(page, stub) {
  const other = await page.context().newPage();
  await other.goto(stub.url);
  await send(other, "before the crash");
  await stub.answer("an answer before the crash");
  await lastReply(other).locator(".figures").waitFor();
  // Chromium's address for a crash; the tab gives no answer to it.
  await Promise.all([other.waitForEvent("crash"), other.goto("chrome://crash").catch(() => {})]);
  await other.close();
  await page.reload();
  await page.locator("#sidebar .title", { hasText: "before the crash" }).click();
  await page.getByText("an answer before the crash").waitFor();
  console.log("ok a reply that has ended outlives a crash");
}
