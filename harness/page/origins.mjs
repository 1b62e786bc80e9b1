// Tests a server without a key from web pages of other origins in headless Chromium: the OpenAI and Anthropic
// SDKs work in a page of an allowed origin, and a page of any other origin can send and read nothing.
//
//   apt-get install chromium                                  (Debian; tested with 156.0.8078.108)
//   python3 harness/clients/install.py browser sdk-browser    (playwright-core, the SDKs and esbuild, pinned)
//   node harness/page/origins.mjs [target/release/hearth] [/usr/bin/chromium]
//
// Both pages come from one server of this test, under names that Chromium resolves to 127.0.0.1. Prints one line
// per check and exits 1 at the first failure.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { createServer } from "node:http";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const installed = join(root, "target/harness");
const hearth = resolve(process.argv[2] ?? join(root, "target/release/hearth"));
const browserPath = process.argv[3] ?? "/usr/bin/chromium";
const { chromium } = createRequire(join(installed, "browser/package.json"))("playwright-core");
const { build } = createRequire(join(installed, "sdk-browser/package.json"))("esbuild");
const TOOL = {
  name: "get_weather",
  description: "Weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const PROMPT = "Please get the weather, city Oslo.";

function check(name, passed) {
  assert.ok(passed, name);
  console.log(`ok ${name}`);
}

/** Both SDKs as one script, which a page imports as it would from a bundler. */
async function bundle() {
  const names = { OpenAI: "openai", Anthropic: "@anthropic-ai/sdk" };
  const line = ([name, from]) => `export { default as ${name} } from "${from}";`;
  const contents = Object.entries(names).map(line).join("\n");
  const resolveDir = join(installed, "sdk-browser");
  const options = { bundle: true, write: false, format: "esm", platform: "browser", logLevel: "error" };
  const made = await build({ ...options, stdin: { contents, resolveDir } });
  return made.outputFiles[0].text;
}

async function listen(script) {
  const pages = createServer((request, reply) => {
    const isScript = request.url === "/sdks.mjs";
    reply.setHeader("content-type", isScript ? "text/javascript" : "text/html; charset=utf-8");
    reply.end(isScript ? script : "<!doctype html><title>A page of another origin</title>");
  });
  await new Promise((done) => pages.listen(0, "127.0.0.1", done));
  return pages;
}

async function freePort() {
  const free = createServer();
  await new Promise((done) => free.listen(0, "127.0.0.1", done));
  const { port } = free.address();
  await new Promise((done) => free.close(done));
  return port;
}

async function serve(...flags) {
  const port = await freePort();
  const fixed = ["serve", "--port", port, "--max-ctx", "4096", "--log", "error"];
  const server = spawn(hearth, [...fixed, ...flags], { stdio: "inherit" });
  for (let tries = 0; tries < 600; tries++) {
    const health = await fetch(`http://127.0.0.1:${port}/health`).catch(() => null);
    if (health?.ok) return { server, url: `http://127.0.0.1:${port}` };
    await new Promise((later) => setTimeout(later, 100));
  }
  throw new Error("the server did not start");
}

async function open(browser, url) {
  const page = await browser.newPage();
  await page.goto(url);
  return page;
}

/** Runs in the page: every call of the SDKs, whole and streamed, and what came back. */
async function useSdks({ url, tool, prompt }) {
  const { OpenAI, Anthropic } = await import("/sdks.mjs");
  const fixed = { apiKey: "none", maxRetries: 0, dangerouslyAllowBrowser: true };
  const openai = new OpenAI({ baseURL: `${url}/v1`, ...fixed });
  const anthropic = new Anthropic({ baseURL: url, ...fixed });
  const model = (await openai.models.list()).data[0].id;
  const messages = [{ role: "user", content: prompt }];
  const chat = { model, seed: 1, temperature: 0, max_tokens: 200, messages };
  const asked = { ...chat, tools: [{ type: "function", function: tool }] };
  const called = (message) => message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
  const { parameters, ...named } = tool;
  const claude = { ...chat, tools: [{ ...named, input_schema: parameters }] };
  const { messages: _, max_tokens: __, ...bare } = chat;
  const response = { ...bare, seed: undefined, input: "Hello", max_output_tokens: 100 };
  const blocks = (message) => message.content.map((block) => [block.type, block.text ?? [block.name, block.input]]);
  let streamed = "";
  for await (const event of await openai.responses.create({ ...response, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  const failed = await openai.chat.completions.create({ ...chat, temperature: -1 }).catch((error) => error);
  return {
    chat: called((await openai.chat.completions.create(asked)).choices[0].message),
    chatStream: called((await openai.chat.completions.stream(asked).finalChatCompletion()).choices[0].message),
    messages: blocks(await anthropic.messages.create(claude)),
    messagesStream: blocks(await anthropic.messages.stream(claude).finalMessage()),
    counted: (await anthropic.messages.countTokens({ model, messages })).input_tokens,
    responses: (await openai.responses.create(response)).output_text,
    responsesStream: streamed,
    failed: [failed.status, failed.message],
  };
}

/** Runs in the page: what a page can do without the server's consent. */
async function attack({ url, prompt }) {
  const body = JSON.stringify({ messages: [{ role: "user", content: prompt }], max_tokens: 4 });
  const json = { "content-type": "application/json" };
  const way = async (path, options) => {
    try {
      const reply = await fetch(`${url}${path}`, options);
      return reply.type === "opaque" ? "sent, not read" : `read ${reply.status}`;
    } catch {
      return "refused";
    }
  };
  return {
    slots: await way("/slots"),
    models: await way("/v1/models"),
    json: await way("/v1/chat/completions", { method: "POST", headers: json, body }),
    text: await way("/v1/chat/completions", { method: "POST", body }),
    blind: await way("/v1/chat/completions", { method: "POST", mode: "no-cors", body }),
  };
}

async function promptTokens(url) {
  return (await (await fetch(`${url}/slots/summary`)).json()).prompt_tokens;
}

async function allowedPage(browser, origin) {
  const { server, url } = await serve("--cors-origin", origin);
  try {
    const page = await open(browser, origin);
    const got = await page.evaluate(useSdks, { url, tool: TOOL, prompt: PROMPT });
    check(`chat calls the tool: ${got.chat}`, got.chat.length === 1 && got.chat[0][0] === TOOL.name);
    assert.deepEqual(got.chatStream, got.chat);
    console.log("ok a streamed chat equals the whole one");
    check("messages call the tool", got.messages.some(([type]) => type === "tool_use"));
    assert.deepEqual(got.messagesStream, got.messages);
    console.log("ok streamed messages equal the whole ones");
    check("tokens are counted", got.counted > 0);
    check("a streamed response equals the whole one", got.responses && got.responsesStream === got.responses);
    check(`an error is read: ${got.failed[1]}`, got.failed[0] === 400 && got.failed[1].includes("temperature"));
    return url;
  } finally {
    server.kill();
  }
}

async function foreignPage(browser, allowed, foreign) {
  const { server, url } = await serve("--cors-origin", allowed);
  try {
    const page = await open(browser, foreign);
    const before = await promptTokens(url);
    const got = await page.evaluate(attack, { url, prompt: PROMPT });
    const { blind, ...rest } = got;
    const isRefused = Object.values(rest).every((way) => way === "refused");
    check(`a foreign page reads nothing: ${JSON.stringify(rest)}`, isRefused);
    check(`what it sends blindly is not run: ${blind}`, (await promptTokens(url)) === before);
    // A name that its owner points to 127.0.0.1 once the page is there: to the page it is its own origin.
    const rebound = await open(browser, url.replace("127.0.0.1", "foreign.example"));
    const read = await rebound.evaluate(async () => (await fetch("/slots")).status);
    check(`a page under a foreign name for the server reads no data: ${read}`, read === 403);
  } finally {
    server.kill();
  }
}

const pages = await listen(await bundle());
const at = (name) => `http://${name}:${pages.address().port}`;
const args = ["--no-sandbox", "--host-resolver-rules=MAP *.example 127.0.0.1"];
const browser = await chromium.launch({ executablePath: browserPath, args });
try {
  console.log(`Chromium ${browser.version()}`);
  await allowedPage(browser, at("app.example"));
  await foreignPage(browser, at("app.example"), at("foreign.example"));
} finally {
  await browser.close();
  pages.close();
}
