// What can go wrong: each fault has a sentence and a way on, and typed text is never lost.

import assert from "node:assert/strict";
import { check, lastReply, open, screenshot, send } from "./browser.mjs";

export async function test(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  const cases = [
    ["a refusal", (reply) => reply.refuse(400, { message: "top_p must be at most 1" }), "Top_p must be at most 1."],
    ["an answer that is no JSON", (reply) => reply.refuse(502, null), "The server answered with status 502"],
    ["a full queue", (reply) => reply.refuse(429, { message: "x", code: "queue_full" }), "too many requests waiting"],
    ["a server that loads", (reply) => reply.refuse(503, { message: "the model is loading" }, { "retry-after": "5" }), "The model is loading."],
    ["a conversation that is too long", (reply) => reply.refuse(400, { message: "5000 tokens", code: "context_length_exceeded" }), "longer than the model can read"],
    ["a server that is gone", null, "cannot be reached"],
    ["a broken stream", (reply) => reply.event("{oops"), "no part of a reply"],
  ];
  for (const [name, break_, said] of cases) {
    stub.isDown = break_ === null;
    await send(page, "my question");
    break_?.(await stub.next());
    await lastReply(page).getByText(said).waitFor();
    check(`${name} is shown as a sentence`, await lastReply(page).getByRole("button", { name: "Try again" }).isVisible());
  }
  stub.isDown = false;
  check("failed questions are marked as left out", (await page.getByText("Not answered.").count()) === cases.length);
  await screenshot(page, "faults");
  const before = stub.asked.length;
  await lastReply(page).getByRole("button", { name: "Try again" }).click();
  let reply = await stub.next();
  assert.deepEqual(reply.body.messages, [{ role: "user", content: "my question" }]);
  reply.say("half");
  await page.getByText("half").waitFor();
  reply.fail({ message: "the device is gone" });
  await lastReply(page).getByText("The device is gone.").waitFor();
  check("an error within a stream keeps what came before", await lastReply(page).getByText("half").isVisible());
  await lastReply(page).getByRole("button", { name: "Try again" }).click();
  reply = await stub.next();
  reply.say("partly");
  await page.getByText("partly").waitFor();
  reply.cut();
  await lastReply(page).getByText("The connection broke before the reply was complete.").waitFor();
  console.log("ok a connection that breaks within a reply is shown");
  await send(page, "and now?");
  reply = await stub.next();
  assert.deepEqual(
    reply.body.messages.map((message) => message.content),
    ["my question", "partly", "and now?"],
  );
  check("later messages work, without the failed ones", stub.asked.length === before + 3);
  await page.locator("#text").fill("typed meanwhile");
  reply.refuse(500, { message: "it broke" });
  await lastReply(page).getByText("It broke.").waitFor();
  check("text that was typed meanwhile stays", (await page.locator("#text").inputValue()) === "typed meanwhile");
  await page.reload();
  await lastReply(page).getByText("It broke.").waitFor();
  check("a failed question is kept over a reload", (await page.locator("article.user").last().locator(".bubble").textContent()) === "and now?");
  assert.deepEqual(faults, []);
  await context.close();
  await noStorage(browser, stub);
}

/** A browser that refuses its storage. */
async function noStorage(browser, stub) {
  const context = await browser.newContext();
  const page = await context.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  await page.addInitScript(() => {
    indexedDB.open = () => {
      throw new DOMException("refused", "SecurityError");
    };
    for (const area of ["localStorage", "sessionStorage"]) {
      Object.defineProperty(window, area, {
        get() {
          throw new DOMException("refused", "SecurityError");
        },
      });
    }
  });
  await page.goto(stub.url);
  await page.getByText("This browser keeps nothing for this page").waitFor();
  await send(page, "x");
  await stub.answer("y");
  await lastReply(page).locator(".figures").waitFor();
  assert.deepEqual(faults, []);
  console.log("ok without storage the page works and says that nothing is kept");
  await context.close();
}
