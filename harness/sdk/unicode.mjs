// Text whose characters are split over tokens, in every dialect, through the parsers of Node's SDKs.
//
//   npm install openai @anthropic-ai/sdk        (in FOLDER; Node 22 or newer)
//   hearth serve --script harness/sdk/unicode.jsonl &
//   node harness/sdk/unicode.mjs [http://127.0.0.1:8000] [FOLDER]
//
// Prints one line a check; exits 1 at the first that does not hold. `unicode.py` says what is replayed.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const need = createRequire(`${resolve(process.argv[3] ?? ".")}/`);
const { default: Anthropic } = need("@anthropic-ai/sdk");
const { default: OpenAI } = need("openai");
const base = process.argv[2] ?? "http://127.0.0.1:8000";
const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0 });
const model = (await openai.models.list()).data[0].id;

const lines = readFileSync(new URL("unicode.jsonl", import.meta.url), "utf8").split("\n").filter((line) => line.startsWith("{"));
const { think, say } = JSON.parse(lines[0]);
const called = { text: 'नमस्ते 👩‍👩‍👧‍👦 "日本" \\ é' };
const parameters = { type: "object", properties: { text: { type: "string" } }, required: ["text"] };
const tool = { name: "post", description: "Posts", parameters };
const user = (content) => [{ role: "user", content }];

function same(name, got, wanted) {
  assert.deepEqual(got, wanted, name);
  console.log(`ok ${name}`);
}

const chat = (fields) => openai.chat.completions.stream({ model, ...fields }).finalChatCompletion();
same("chat: text", (await chat({ messages: user("a text") })).choices[0].message.content, say);
const thought = { reasoning: "", content: "" };
for await (const chunk of await openai.chat.completions.create({ model, messages: user("a thought"), enable_thinking: true, stream: true })) {
  thought.reasoning += chunk.choices[0]?.delta.reasoning_content ?? "";
  thought.content += chunk.choices[0]?.delta.content ?? "";
}
same("chat: reasoning", [thought.reasoning.trim(), thought.content], [think, say]);
const call = (await chat({ messages: user("a call"), tools: [{ type: "function", function: tool }] })).choices[0].message.tool_calls[0];
same("chat: arguments", JSON.parse(call.function.arguments), called);

const messages = (fields) => anthropic.messages.stream({ model, max_tokens: 2048, ...fields }).finalMessage();
same("messages: text", (await messages({ messages: user("a text") })).content.map((block) => block.text), [say]);
const blocks = (await messages({ messages: user("a thought"), thinking: { type: "enabled", budget_tokens: 1024 } })).content;
same("messages: thinking", blocks.map((block) => (block.thinking ?? block.text).trim()), [think, say]);
const used = await messages({ messages: user("a call"), tools: [{ name: "post", description: "Posts", input_schema: parameters }] });
same("messages: input", used.content.filter((block) => block.type === "tool_use").map((block) => block.input), [called]);

const responses = (fields) => openai.responses.stream({ model, ...fields }).finalResponse();
same("responses: text", (await responses({ input: "a text" })).output_text, say);
const items = (await responses({ input: "a call", tools: [{ type: "function", strict: false, ...tool }] })).output;
same("responses: arguments", items.filter((item) => item.type === "function_call").map((item) => JSON.parse(item.arguments)), [called]);

let text = "";
for await (const part of await openai.completions.create({ model, prompt: "a text", max_tokens: 400, stream: true })) text += part.choices[0]?.text ?? "";
same("completions: text", text, say);
