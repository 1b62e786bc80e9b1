// A reply from the question to its figures: progress, thinking, Markdown, stop, figures, attachments, tools.

import assert from "node:assert/strict";
import { check, eventually, frames, lastReply, open, replies, screenshot, send, slowness, threadTime } from "./browser.mjs";

export async function test(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  await page.locator("#model", { hasText: "tiny" }).waitFor();
  await eventually("the message box has the focus at the start", () => page.locator("#text").evaluate((box) => box === document.activeElement));
  await progress(page, stub);
  await markdown(page, stub);
  await stopping(page, stub);
  await figures(page, stub);
  await files(page, stub);
  await tools(page, stub);
  await longReply(page, stub);
  assert.deepEqual(faults, []);
  console.log("ok no error, nothing refused by the policy, no request to another host");
  await context.close();
}

async function progress(page, stub) {
  await send(page, "A question");
  const reply = await stub.next();
  await lastReply(page).getByText("Waiting for the server").waitFor();
  reply.progress(450, 1000);
  await lastReply(page).getByText("45 %").waitFor();
  check("progress of the prompt is shown", await lastReply(page).getByText("Reading the conversation").isVisible());
  const begun = performance.now();
  reply.think("First this, ");
  await lastReply(page).locator("summary", { hasText: "Thinking" }).waitFor();
  reply.think("then that.");
  await page.waitForTimeout(1100);
  reply.say("Half");
  await lastReply(page).getByText("Half").waitFor();
  const most = (performance.now() - begun) / 1000;
  const fold = lastReply(page).locator("details.thinking");
  check("thoughts are folded", !(await fold.locator("pre").isVisible()));
  reply.say(" and whole.");
  await lastReply(page).getByText("Half and whole.").waitFor();
  check("the reply grows", await page.locator("#stop").isVisible());
  reply.end();
  await lastReply(page).locator(".figures").waitFor();
  const [, seconds] = /Thought for (\d+\.\d) s/.exec(await fold.locator("summary").textContent()) ?? [];
  check(`thinking has its time: ${seconds} s`, seconds >= 1.1 && seconds <= most + 0.05);
  await fold.locator("summary").click();
  check("thoughts can be unfolded", (await fold.locator("pre").textContent()) === "First this, then that.");
  const said = await page.locator("[role=status]").first().textContent();
  check("the reply is announced to screen readers once", said.includes("Half and whole."));
}

const SAMPLE = [
  "# Title\n\nSome **bold**, *slanted* and `code` text.\n\n",
  '```python\nprint("<b>")\n```\n\n',
  "| a | b |\n|--:|:-:|\n| 1 | $x^2$ |\n\n",
  "$$\\frac{1}{2}$$\n\n- [x] done\n- plain\n\n1. one\n2. two\n",
].join("");

async function markdown(page, stub) {
  await send(page, "Markdown, please");
  const reply = await stub.next();
  for (const piece of SAMPLE.match(/[^]{1,7}/g)) reply.say(piece);
  reply.end();
  await lastReply(page).locator(".figures").waitFor();
  const shown = lastReply(page).locator(".markdown");
  check("headings, bold and code", (await shown.locator(".heading-1, strong, em, :not(pre) > code").count()) === 4);
  check("code has its language and colours", (await shown.locator("figcaption").textContent()) === "python" && (await shown.locator(".hljs-string").count()) === 1);
  await shown.getByRole("button", { name: "Copy code" }).click();
  const copied = () => page.evaluate(() => navigator.clipboard.readText());
  await eventually("code is copied as it is", async () => (await copied()) === 'print("<b>")');
  await lastReply(page).getByRole("button", { name: "Copy message" }).click();
  await eventually("a message is copied as Markdown", async () => (await copied()) === SAMPLE);
  check("tables", (await shown.locator("td.align-right").textContent()) === "1" && (await shown.locator("th").count()) === 2);
  check("mathematics in a line and in a block", (await shown.locator("math").count()) === 2 && (await shown.locator("mfrac").count()) === 1);
  check("lists and boxes", (await shown.locator("ol li").count()) === 2 && (await shown.locator(".box.done").count()) === 1);
}

async function stopping(page, stub) {
  for (const way of ["button", "key"]) {
    await send(page, "A long story");
    const reply = await stub.next();
    reply.say("Once upon a time");
    await lastReply(page).getByText("Once upon").waitFor();
    if (way === "button") await page.getByRole("button", { name: "Stop the reply" }).click();
    else await page.keyboard.press("Escape");
    await lastReply(page).getByText("You stopped this reply.").waitFor();
    await reply.isGone;
    check(`stop by ${way} keeps the text and ends the request`, (await lastReply(page).locator(".markdown").textContent()) === "Once upon a time");
    const focused = () => page.waitForFunction(() => document.activeElement?.id === "text");
    await focused();
  }
  await lastReply(page).getByRole("button", { name: "Continue" }).click();
  const more = await stub.next();
  assert.deepEqual(more.body.messages.at(-1), { role: "assistant", content: "Once upon a time" });
  assert.deepEqual([more.body.continue_final_message, more.body.add_generation_prompt], [true, false]);
  more.say(" there was");
  more.end();
  await lastReply(page).locator(".figures").waitFor();
  check("a reply that was cut goes on in place", (await lastReply(page).locator(".markdown").textContent()) === "Once upon a time there was");
  check("the focus is in the message box after a stop", await page.getByRole("button", { name: "Send" }).isVisible());
}

async function figures(page, stub) {
  await send(page, "Numbers");
  await stub.answer("68");
  const line = lastReply(page).locator(".figures summary");
  await line.waitFor();
  const said = await line.textContent();
  check(`figures in words: ${said}`, said === "52 tokens · 43.3 per second · 78 % of guesses right · 93 % of the prompt remembered");
  await line.click();
  const all = await lastReply(page).locator(".figures dl").textContent();
  for (const part of ["1,204 of 1,300 prompt tokens", "100 tokens, 78 right", "Right guesses of text that repeats38 of 40 tokens", "Right guesses of the model's own next-token head40 of 60 tokens"]) {
    check(`all figures: ${part}`, all.includes(part));
  }
  check("a source that guessed nothing is not named", !all.includes("the draft model"));
  const meter = page.locator(".meter");
  check("the context meter", (await meter.textContent()).includes("1,352 of 4,096 tokens of context used") && (await meter.locator("meter").getAttribute("value")) === "1352");
  await send(page, "More");
  await stub.answer("x", { reason: "length", usage: { prompt_tokens: 4000, completion_tokens: 96, total_tokens: 4096 } });
  await meter.getByText("Nearly full").waitFor();
  check("a reply that was cut says so", (await lastReply(page).locator(".figures summary").textContent()).includes("cut at the length limit"));
}

async function files(page, stub) {
  const picker = page.locator("#composer input[type=file]");
  await picker.setInputFiles([
    { name: "notes.md", mimeType: "text/markdown", buffer: Buffer.from("a\n```\nb\n```\n") },
    { name: "photo.png", mimeType: "image/png", buffer: Buffer.from([0x89, 0x50, 0, 0xff]) },
  ]);
  await page.getByText("photo.png is not a text file").waitFor();
  await picker.setInputFiles({ name: "extra.txt", mimeType: "text/plain", buffer: Buffer.from("x") });
  await page.getByRole("button", { name: "Remove extra.txt" }).click();
  await send(page, "What is in it?");
  const reply = await stub.next();
  const sent = reply.body.messages.at(-1).content;
  check("a file is sent in a fence of its own", sent === "File notes.md:\n````\na\n```\nb\n```\n````\n\nWhat is in it?");
  reply.say("Letters.");
  reply.end();
  await lastReply(page).locator(".figures").waitFor();
  check("the file stands with its question", await page.locator("article.user").last().locator("summary", { hasText: "notes.md" }).isVisible());
  // A file that is dropped.
  await page.evaluate(() => {
    const data = new DataTransfer();
    data.items.add(new File(["dropped"], "dropped.txt"));
    document.querySelector("main").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
  });
  await page.getByRole("button", { name: "Remove dropped.txt" }).click();
  console.log("ok a file can be dropped");
}

async function tools(page, stub) {
  await send(page, "The weather?");
  const reply = await stub.next();
  reply.call(0, { id: "call_1", function: { name: "get_weather", arguments: "" } });
  for (const part of ['{"city":', '"Oslo"}']) reply.call(0, { function: { arguments: part } });
  reply.end("tool_calls");
  const call = lastReply(page).locator(".call");
  await call.getByText("get_weather").first().waitFor();
  check("a tool call is shown", (await call.locator("pre").textContent()).includes('"city": "Oslo"'));
  await screenshot(page, "tools");
  await call.getByLabel("Result of get_weather").fill("rain");
  await page.getByRole("button", { name: "Give the result" }).click();
  const next = await stub.next();
  const [asked, given] = next.body.messages.slice(-2);
  assert.deepEqual(asked.tool_calls, [{ id: "call_1", type: "function", function: { name: "get_weather", arguments: '{"city":"Oslo"}' } }]);
  assert.deepEqual(given, { role: "tool", tool_call_id: "call_1", content: "rain" });
  console.log("ok the result of a tool goes back to the model");
  next.say("It rains.");
  next.end();
  await lastReply(page).getByText("It rains.").waitFor();
}

/** The page must stay usable while a long reply streams in, and follow it only while its end is in sight. */
async function longReply(page, stub) {
  const before = await replies(page).count();
  await send(page, "Much text");
  const reply = await stub.next();
  const block = (n) => `## Part ${n}\n\nWords of part ${n}, **some bold**, and \`code\`.\n\n\`\`\`js\nconst part = ${n};\n\`\`\`\n\n| a | b |\n|---|---|\n| ${n} | x |\n\n`;
  const slow = slowness();
  const used = await threadTime(page);
  const { middle, worst } = await frames(page, async () => {
    for (let n = 0; n < 400; n++) {
      for (const piece of block(n).match(/[^]{1,30}/g)) reply.say(piece);
      if (n % 20 === 19) await new Promise((later) => setTimeout(later, 20));
    }
    await page.waitForFunction((count) => document.querySelectorAll("article.assistant")[count]?.textContent.includes("Words of part 399"), before);
  });
  const ms = await used();
  const limit = 1500 * Math.max(slow, slowness());
  check(`a reply of ${400 * block(100).length} characters: frames of ${middle.toFixed(0)} ms in the middle, ${worst.toFixed(0)} ms at worst (below ${limit.toFixed(0)}), ${ms} ms of the page's thread`, worst < limit && ms < 15_000);
  const thread = page.locator("#thread");
  const distance = () => thread.evaluate((place) => place.scrollHeight - place.scrollTop - place.clientHeight);
  await page.waitForFunction(() => {
    const place = document.getElementById("thread");
    return place.scrollHeight - place.scrollTop - place.clientHeight < 80;
  });
  console.log("ok the page follows the reply");
  await thread.hover();
  await page.mouse.wheel(0, -3000);
  await page.getByRole("button", { name: "Go to the last message" }).waitFor();
  // Wheels scroll smoothly.
  const held = await thread.evaluate(async (place) => {
    let [last, still] = [-1, 0];
    while (still < 20) {
      await new Promise((later) => setTimeout(later, 20));
      still = place.scrollTop === last ? still + 1 : 0;
      last = place.scrollTop;
    }
    return last;
  });
  reply.say("The end.\n\n".repeat(20));
  await page.waitForTimeout(400);
  check("a reader who scrolled up is left alone", Math.abs((await thread.evaluate((place) => place.scrollTop)) - held) < 5);
  await page.getByRole("button", { name: "Go to the last message" }).click();
  await eventually("a button goes to the end", async () => (await distance()) < 80);
  reply.end();
  await lastReply(page).locator(".figures").waitFor();
  await screenshot(page, "long");
}
