// Characters that span several tokens, in every API, through the parsers of Node's SDKs.
//
//   npm install openai @anthropic-ai/sdk        (in FOLDER; Node 22 or newer)
//   hearth serve --script harness/sdk/unicode.jsonl &
//   node harness/sdk/unicode.mjs [http://127.0.0.1:8000] [FOLDER]
//
// Prints one line per check; exits 1 at the first failed check. `unicode.py` describes the replayed text.

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

const script = readFileSync(new URL("unicode.jsonl", import.meta.url), "utf8").split("\n");
const { think: reasoning, say: text } = JSON.parse(script.find((line) => line.startsWith("{")));
const callArguments = { text: 'नमस्ते 👩‍👩‍👧‍👦 "日本" \\ é' };
const parameters = { type: "object", properties: { text: { type: "string" } }, required: ["text"] };
const tool = { name: "post", description: "Posts", parameters };
const user = (content) => [{ role: "user", content }];

function checkEqual(name, got, expected) {
  assert.deepEqual(got, expected, name);
  console.log(`ok ${name}`);
}

const chat = (fields) => openai.chat.completions.stream({ model, ...fields }).finalChatCompletion();
checkEqual("chat: text", (await chat({ messages: user("a text") })).choices[0].message.content, text);
const reply = { reasoning: "", content: "" };
const thinking = { model, messages: user("a thought"), enable_thinking: true, stream: true };
for await (const chunk of await openai.chat.completions.create(thinking)) {
  reply.reasoning += chunk.choices[0]?.delta.reasoning_content ?? "";
  reply.content += chunk.choices[0]?.delta.content ?? "";
}
checkEqual("chat: reasoning", [reply.reasoning.trim(), reply.content], [reasoning, text]);
const withCall = await chat({ messages: user("a call"), tools: [{ type: "function", function: tool }] });
const call = withCall.choices[0].message.tool_calls[0];
checkEqual("chat: arguments", JSON.parse(call.function.arguments), callArguments);

const messages = (fields) => anthropic.messages.stream({ model, max_tokens: 2048, ...fields }).finalMessage();
const plainBlocks = (await messages({ messages: user("a text") })).content;
checkEqual("messages: text", plainBlocks.map((block) => block.text), [text]);
const budget = { type: "enabled", budget_tokens: 1024 };
const blocks = (await messages({ messages: user("a thought"), thinking: budget })).content;
const texts = blocks.map((block) => (block.thinking ?? block.text).trim());
checkEqual("messages: thinking", texts, [reasoning, text]);
const anthropicTool = { name: "post", description: "Posts", input_schema: parameters };
const used = (await messages({ messages: user("a call"), tools: [anthropicTool] })).content;
const inputs = used.filter((block) => block.type === "tool_use").map((block) => block.input);
checkEqual("messages: input", inputs, [callArguments]);

const responses = (fields) => openai.responses.stream({ model, ...fields }).finalResponse();
checkEqual("responses: text", (await responses({ input: "a text" })).output_text, text);
const responsesTool = { type: "function", strict: false, ...tool };
const items = (await responses({ input: "a call", tools: [responsesTool] })).output;
const calls = items.filter((item) => item.type === "function_call");
checkEqual("responses: arguments", calls.map((item) => JSON.parse(item.arguments)), [callArguments]);

let completion = "";
const streaming = { model, prompt: "a text", max_tokens: 400, stream: true };
for await (const part of await openai.completions.create(streaming)) {
  completion += part.choices[0]?.text ?? "";
}
checkEqual("completions: text", completion, text);
