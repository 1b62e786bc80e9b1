// New answers, edited questions and the versions that they make; keys and the order of focus.

import assert from "node:assert/strict";
import { check, eventually, lastReply, open, replies, send } from "./browser.mjs";

const texts = (body) => body.messages.map((message) => `${message.role}: ${message.content}`);

export async function test(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  await send(page, "one");
  await stub.answer("first");
  await lastReply(page).locator(".figures").waitFor();
  await lastReply(page).getByRole("button", { name: "New answer" }).click();
  let reply = await stub.next();
  assert.deepEqual(texts(reply.body), ["user: one"]);
  reply.say("second");
  reply.end();
  await lastReply(page).getByText("2/2").waitFor();
  check("a new answer is a second version", (await lastReply(page).locator(".markdown").textContent()) === "second");
  await lastReply(page).getByRole("button", { name: "Earlier version" }).click();
  await lastReply(page).getByText("1/2").waitFor();
  check("the first version is still there", (await lastReply(page).locator(".markdown").textContent()) === "first");
  await send(page, "two");
  reply = await stub.next();
  assert.deepEqual(texts(reply.body), ["user: one", "assistant: first", "user: two"]);
  console.log("ok the conversation goes on from the shown version");
  reply.say("third");
  reply.end();
  await lastReply(page).locator(".figures").waitFor();

  // Editing by keyboard: arrow up in the empty box.
  await page.locator("#text").press("ArrowUp");
  const editor = page.getByRole("textbox", { name: "Text of the message" });
  await editor.waitFor();
  check("arrow up edits the last question", (await editor.inputValue()) === "two" && (await editor.evaluate((box) => box === document.activeElement)));
  await editor.press("Escape");
  await page.waitForFunction(() => document.activeElement?.id === "text");
  check("escape leaves the question as it was", (await page.locator("article.user").last().locator(".bubble").textContent()) === "two");
  await page.locator("article.user").first().getByRole("button", { name: "Edit message" }).click();
  await editor.fill("ONE");
  await editor.press("Enter");
  reply = await stub.next();
  assert.deepEqual(texts(reply.body), ["user: ONE"]);
  reply.say("fourth");
  reply.end();
  await lastReply(page).locator(".figures").waitFor();
  check("an edited question begins a branch", (await replies(page).count()) === 1);
  const question = page.locator("article.user").first();
  await question.getByRole("button", { name: "Earlier version" }).click();
  await page.getByText("third").waitFor();
  check("the old branch is there with all its messages", (await replies(page).count()) === 2);

  await lastReply(page).getByRole("button", { name: "Edit message" }).click();
  await editor.fill("corrected");
  await page.getByRole("button", { name: "Save" }).click();
  await send(page, "three");
  reply = await stub.next();
  assert.equal(texts(reply.body).at(-2), "assistant: corrected");
  console.log("ok a reply can be corrected");
  reply.end();
  await lastReply(page).locator(".figures").waitFor();
  await page.reload();
  await page.getByText("corrected").waitFor();
  await question.getByRole("button", { name: "Later version" }).click();
  await page.getByText("fourth").waitFor();
  console.log("ok versions are kept over a reload");
  await keys(page, stub);
  assert.deepEqual(faults, []);
  await context.close();
}

const focused = (page) => page.evaluate(() => document.activeElement?.getAttribute("aria-label") ?? document.activeElement?.textContent?.trim());

async function keys(page, stub) {
  await page.keyboard.press("Control+Shift+Enter");
  const reply = await stub.next();
  reply.say("by key");
  reply.end();
  await lastReply(page).getByText("by key").waitFor();
  console.log("ok a new answer by key");
  await page.keyboard.press("Control+Shift+O");
  await page.getByRole("heading", { name: "New chat" }).waitFor();
  await page.waitForFunction(() => document.activeElement?.id === "text");
  console.log("ok a new chat by key");
  await page.keyboard.press("Control+k");
  await page.waitForFunction(() => document.activeElement?.type === "search");
  console.log("ok the search by key");
  await page.keyboard.press("Shift+Escape");
  await page.waitForFunction(() => document.activeElement?.id === "text");
  await page.keyboard.type("line one");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("line two");
  check("shift and enter make a line", (await page.locator("#text").inputValue()) === "line one\nline two");
  await page.locator("#text").fill("");
  const dialogs = [["Control+,", "Settings"], ["Control+/", "Help"]];
  for (const [key, title] of dialogs) {
    await page.keyboard.press(key);
    await page.getByRole("dialog", { name: title }).waitFor();
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "detached" });
    await eventually(`${title} by key, and the focus comes back`, async () => (await focused(page)) === "Message");
  }
  for (let round = 0; round < 20; round++) {
    const [key, title] = dialogs[round % 2];
    await page.keyboard.press(key);
    await page.getByRole("dialog", { name: title }).waitFor();
    await page.keyboard.press("Escape");
    // Closed for the eye; what the browser reports comes later.
    await page.getByRole("dialog").waitFor({ state: "detached" });
  }
  console.log("ok a key right behind a dialog that closes opens the next one");
  // From the top of the page by Tab alone.
  const first = await page.evaluate(() => document.querySelector("a[href], button, input, textarea")?.textContent.trim());
  check("the first stop leads to the message box", first === "To the message box");
  await page.locator(".skip").focus();
  const seen = [];
  for (let stops = 0; stops < 30 && !seen.includes("Message"); stops++) {
    await page.keyboard.press("Tab");
    seen.push(await focused(page));
  }
  const order = ["New chat", "one", "Settings", "Help", "Messages", "Attach text files", "Message"].map((name) => seen.indexOf(name));
  check(`the focus goes through the page in reading order: ${seen.join(", ")}`, order.every((at, i) => at >= 0 && (i === 0 || at > order[i - 1])));
  await page.locator(".skip").focus();
  await page.keyboard.press("Enter");
  await eventually("the first stop works", async () => (await focused(page)) === "Message");
}
