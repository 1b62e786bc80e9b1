// Settings: what is not set is not sent; system prompt, thinking, sampling, tools, model, colours, API key.

import assert from "node:assert/strict";
import { check, lastReply, open, screenshot, send } from "./browser.mjs";

async function ask(page, stub, text = "x") {
  await send(page, text);
  const reply = await stub.next();
  reply.say("ok");
  reply.end();
  await lastReply(page).locator(".figures").waitFor();
  return reply.body;
}

const settings = (page) => page.getByRole("button", { name: /^Settings/ }).first().click();
const close = async (page) => {
  await page.keyboard.press("Escape");
  await page.getByRole("dialog").waitFor({ state: "detached" });
};

export async function test(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  await page.locator("#model", { hasText: "tiny" }).waitFor();
  assert.deepEqual(Object.keys(await ask(page, stub)).sort(), ["messages", "return_progress", "stream", "stream_options"]);
  console.log("ok nothing is sent that the user did not set");

  await settings(page);
  check("the server's defaults are shown", (await page.getByLabel("Temperature").getAttribute("placeholder")) === "0.3");
  const thinking = page.getByLabel("Thinks before it answers");
  check("the server's thinking default is named", (await thinking.locator("option").first().textContent()) === "Server's default (on)");
  await screenshot(page, "settings");
  await page.getByLabel("For this conversation").fill("Be brief.");
  await thinking.selectOption("on");
  await page.getByLabel("Effort").selectOption("low");
  await page.getByLabel("Thinking limit").fill("100");
  for (const [label, value] of [["Temperature", "0"], ["Top p", "0.9"], ["Top k", "40"], ["Min p", "0.05"], ["Repetition penalty", "1.1"], ["Presence penalty", "-1"], ["Frequency penalty", "0.5"], ["Longest reply", "200"], ["Seed", "7"]]) {
    await page.getByLabel(label).fill(value);
  }
  await page.getByLabel("Stop texts, one a line").fill("END\n\nSTOP");
  await page.getByText("Tools", { exact: true }).click();
  await page.getByLabel("Functions the model may call").fill('[{"type":"function","function":{"name":"f"}}]');
  await close(page);
  check("changed settings are counted in sight", (await page.locator(".badge").textContent()) === "14");
  const sent = await ask(page, stub);
  assert.deepEqual(sent.messages[0], { role: "system", content: "Be brief." });
  const { messages, stream, stream_options, return_progress, ...fields } = sent;
  assert.deepEqual(fields, {
    temperature: 0,
    top_p: 0.9,
    top_k: 40,
    min_p: 0.05,
    repetition_penalty: 1.1,
    presence_penalty: -1,
    frequency_penalty: 0.5,
    max_tokens: 200,
    seed: 7,
    thinking_budget_tokens: 100,
    enable_thinking: true,
    reasoning_effort: "low",
    stop: ["END", "STOP"],
    tools: [{ type: "function", function: { name: "f" } }],
  });
  console.log("ok what is set is sent");
  await page.reload();
  await page.locator(".badge").waitFor();
  await settings(page);
  check("settings are kept", (await page.getByLabel("Temperature").inputValue()) === "0");
  await page.getByLabel("Temperature").fill("9");
  await page.getByLabel("Temperature").press("Tab");
  await page.getByRole("button", { name: "Back to the server's defaults" }).click();
  await page.getByLabel("For new conversations").fill("Always rhyme.");
  await page.getByLabel("Thinks before it answers").selectOption("off");
  await close(page);
  await page.getByRole("button", { name: "New chat" }).first().click();
  const plain = await ask(page, stub);
  check("a number out of range is not taken", !("temperature" in plain) && plain.enable_thinking === false);
  assert.deepEqual(plain.messages[0], { role: "system", content: "Always rhyme." });
  console.log("ok a new conversation starts with the standing system prompt");

  await settings(page);
  await page.getByText("Tools", { exact: true }).click();
  await page.getByLabel("Functions the model may call").fill("[oops");
  await close(page);
  await send(page, "x");
  await page.getByText("The tools in the settings are not valid JSON").waitFor();
  console.log("ok tools that are no JSON are named before anything is sent");
  await colours(page);
  assert.deepEqual(faults, []);
  await context.close();
  await severalModels(browser, stub);
  await apiKey(browser, stub);
}

async function colours(page) {
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await settings(page);
  await page.getByLabel("Colours").selectOption("dark");
  const dark = await ground();
  await page.reload();
  check("dark colours can be chosen and are kept", light !== dark && (await ground()) === dark);
}

async function severalModels(browser, stub) {
  stub.models = [
    { id: "tiny", context_length: 4096, state: "loaded" },
    { id: "large", context_length: 32768, state: "unloaded" },
  ];
  const { page, faults, context } = await open(browser, stub.url);
  const picker = page.getByLabel("Model");
  await picker.waitFor();
  check("models that are not loaded say so", (await picker.locator("option").last().textContent()) === "large (unloaded)");
  await picker.selectOption("large");
  check("the chosen model is asked", (await ask(page, stub)).model === "large");
  stub.models = stub.models.slice(0, 1);
  assert.deepEqual(faults, []);
  await context.close();
}

async function apiKey(browser, stub) {
  stub.key = "right";
  const { page, context } = await open(browser, stub.url);
  await page.getByRole("button", { name: "Enter the key" }).click();
  await page.getByLabel("API key of this server").fill("wrong");
  await page.keyboard.press("Enter");
  await page.getByText("The API key is not one this server knows.").first().waitFor();
  await page.getByLabel("API key of this server").fill("right");
  await page.keyboard.press("Enter");
  await page.getByRole("dialog").waitFor({ state: "detached" });
  await page.locator("#model", { hasText: "tiny" }).waitFor();
  console.log("ok a wrong key is named, and the right one opens the page");
  await ask(page, stub);
  await page.reload();
  await page.locator("#model", { hasText: "tiny" }).waitFor();
  console.log("ok the key is kept for the tab");
  await page.getByRole("button", { name: "Help" }).click();
  const [status] = await Promise.all([context.waitForEvent("page"), page.getByRole("link", { name: "Status of the server" }).click()]);
  await status.getByText("Live", { exact: true }).waitFor();
  console.log("ok the status page opens with the key of the chat page");
  const other = await page.context().newPage();
  await other.goto(`${stub.url}#key=right`);
  await other.locator("#model", { hasText: "tiny" }).waitFor();
  check("a key in the address opens the page and goes out of sight", !other.url().includes("right"));
  stub.key = null;
  await context.close();
}
