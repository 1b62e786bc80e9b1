// Conversations: kept, found, renamed, deleted, taken out and in; replies that go on while another one is shown.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { check, frames, lastReply, open, send, slowness, threadTime } from "./browser.mjs";

const list = (page) => page.locator("#sidebar .title").allTextContents();

export async function test(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  await send(page, "Tell me about cats");
  const cats = await stub.next();
  cats.say("Cats purr.");
  await page.getByText("Cats purr.").waitFor();
  await page.getByRole("button", { name: "New chat" }).first().click();
  check("a new chat is empty while the old one is answered", (await page.locator("article").count()) === 0);
  await send(page, "Tell me about dogs");
  const dogs = await stub.next();
  assert.deepEqual(dogs.body.messages, [{ role: "user", content: "Tell me about dogs" }]);
  cats.say(" They sleep.");
  cats.end();
  dogs.say("Dogs bark.");
  dogs.end();
  await lastReply(page).locator(".figures").waitFor();
  check("nothing of the old answer is in the new chat", !(await page.locator("#thread").textContent()).includes("Cats"));
  await page.locator("#sidebar .title", { hasText: "cats" }).click();
  await page.getByText("Cats purr. They sleep.").waitFor();
  console.log("ok the old answer was finished in its own chat");

  await page.reload();
  await page.getByText("Cats purr. They sleep.").waitFor();
  check("conversations and the shown one are kept", (await list(page)).length === 2);
  await page.getByRole("searchbox").fill("bark");
  await page.waitForFunction(() => document.querySelectorAll("#sidebar .title").length === 1);
  assert.deepEqual(await list(page), ["Tell me about dogs"]);
  await page.getByRole("searchbox").fill("zebra");
  await page.getByText("Nothing was found.").waitFor();
  await page.getByRole("searchbox").fill("");
  await page.waitForFunction(() => document.querySelectorAll("#sidebar .title").length === 2);
  console.log("ok search looks into the messages");

  const cat = page.locator("#sidebar li", { hasText: "cats" });
  await cat.hover();
  await cat.getByRole("button", { name: /^Rename/ }).click();
  await page.getByRole("textbox", { name: "New name" }).fill("About <b>felines</b>");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "About <b>felines</b>" }).waitFor();
  console.log("ok a conversation can be renamed");

  await page.getByRole("button", { name: "Settings" }).first().click();
  const [saved] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export all" }).click()]);
  const file = await saved.path();
  const exported = JSON.parse(readFileSync(file, "utf8"));
  check("all conversations can be exported", exported.conversations.length === 2);
  const [text] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "This one as Markdown" }).click()]);
  check("one can be exported as Markdown", readFileSync(await text.path(), "utf8").includes("## You\n\nTell me about cats\n\n## tiny\n\nCats purr."));
  await page.keyboard.press("Escape");

  for (const name of ["felines", "dogs"]) {
    const entry = page.locator("#sidebar li", { hasText: name });
    await entry.hover();
    await entry.getByRole("button", { name: /^Delete/ }).click();
    await page.locator("#sidebar").getByRole("button", { name: "Delete", exact: true }).click();
    await entry.waitFor({ state: "detached" });
  }
  await page.reload();
  await page.getByText("Your conversations will be listed here.").waitFor();
  console.log("ok conversations can be deleted, after a question");

  await page.getByRole("button", { name: "Settings" }).first().click();
  const input = page.locator("label", { hasText: "Import" }).locator("input");
  for (const [content, said] of [["nothing", "This file is not JSON"], ['{"a":1}', "holds no conversations of this page"]]) {
    await input.setInputFiles({ name: "x.json", mimeType: "application/json", buffer: Buffer.from(content) });
    await page.getByText(said).waitFor();
  }
  await input.setInputFiles(file);
  await page.getByText("2 conversations taken in.").waitFor();
  await page.keyboard.press("Escape");
  await page.locator("#sidebar .title", { hasText: "dogs" }).click();
  await page.getByText("Dogs bark.").waitFor();
  console.log("ok conversations can be imported, and foreign files are refused");

  // Typed text survives a reload, and so does a reply that was cut by one.
  await send(page, "More on dogs");
  const cut = await stub.next();
  cut.say("They also");
  await page.getByText("They also").waitFor();
  await page.locator("#text").fill("typed and not sent");
  await page.reload();
  await page.getByText("They also").waitFor();
  check("typed text is there after a reload", (await page.locator("#text").inputValue()) === "typed and not sent");
  check("a reply that a reload cut is marked", await lastReply(page).getByText("You stopped this reply.").isVisible());
  await secondTab(page, stub);
  await longConversation(page, stub);
  assert.deepEqual(faults, []);
  await context.close();
}

async function secondTab(page, stub) {
  const other = await page.context().newPage();
  await other.goto(stub.url);
  await send(other, "From another tab");
  await stub.answer("Hello there");
  await page.locator("#sidebar .title", { hasText: "From another tab" }).waitFor();
  console.log("ok the list follows other tabs");
  await other.close();
}

/** A conversation of 400 messages opens, is typed into and answered without a stall. */
async function longConversation(page, stub) {
  const messages = {};
  const chosen = {};
  let parent = null;
  for (let n = 0; n < 400; n++) {
    const id = `m${n}`;
    const reply = `## Part ${n}\n\nWords, **some bold**.\n\n\`\`\`js\nfor (let i = 0; i < ${n}; i++) console.log(i);\n\`\`\`\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n${"More text follows. ".repeat(40)}`;
    messages[id] = { id, parent, role: n % 2 ? "assistant" : "user", content: n % 2 ? reply : `question ${n}`, created: 1000 + n };
    chosen[parent ?? ""] = id;
    parent = id;
  }
  const conversations = [{ id: "long", title: "A long one", named: true, created: 1, updated: 2, system: "", messages, chosen }];
  await page.getByRole("button", { name: "Settings" }).first().click();
  const file = Buffer.from(JSON.stringify({ format: "hearth-conversations", version: 1, conversations }));
  await page.locator("label", { hasText: "Import" }).locator("input").setInputFiles({ name: "long.json", mimeType: "application/json", buffer: file });
  await page.getByText("1 conversation taken in.").waitFor();
  await page.keyboard.press("Escape");
  const slow = slowness();
  let used = await threadTime(page);
  await page.locator("#sidebar .title", { hasText: "A long one" }).click();
  await page.getByText("question 398").waitFor();
  const opened = await used();
  await page.waitForFunction(() => {
    const place = document.getElementById("thread");
    return place.scrollHeight - place.scrollTop - place.clientHeight < 80;
  });
  await page.locator("#text").fill("and now?");
  used = await threadTime(page);
  const { middle, worst } = await frames(page, async () => {
    await page.keyboard.press("Enter");
    const reply = await stub.next();
    check("all 401 messages are sent", reply.body.messages.length === 401);
    for (let n = 0; n < 100; n++) {
      reply.say("some words and more ");
      await new Promise((later) => setTimeout(later, 10));
    }
    reply.end();
    await lastReply(page).locator(".figures").waitFor();
  });
  const answered = await used();
  const limit = 1500 * Math.max(slow, slowness());
  check(`400 messages open in ${opened} ms of the page's thread, an answer takes ${answered} ms; frames of ${middle.toFixed(0)} ms in the middle, ${worst.toFixed(0)} ms at worst (below ${limit.toFixed(0)})`, opened < 6000 && answered < 6000 && worst < limit);
}
