// The OpenAI and Anthropic SDKs of Node against a running server: what their stream parsers join must be what the
// whole answer says.
//
//   npm install openai @anthropic-ai/sdk        (in FOLDER; Node 22 or newer)
//   hearth serve &
//   node harness/sdk/streams.mjs [http://127.0.0.1:8000] [FOLDER]
//
// Prints one line a check; exits 1 at the first that does not hold.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const need = createRequire(`${resolve(process.argv[3] ?? ".")}/`);
const { default: Anthropic } = need("@anthropic-ai/sdk");
const { default: OpenAI } = need("openai");
const base = process.argv[2] ?? "http://127.0.0.1:8000";
const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0 });
const model = (await openai.models.list()).data[0].id;
const prompt = "Please get the weather, city Oslo.";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = { name: "get_weather", description: "Weather of a city", parameters };
const fixed = { model, seed: 1, temperature: 0 };

function same(name, streamed, whole) {
  assert.deepEqual(streamed, whole, name);
  console.log(`ok ${name}`);
}

for (const [name, content, tools] of [["text", "Hello 👋", []], ["tool", prompt, [tool]]]) {
  const chat = {
    ...fixed,
    max_tokens: 200,
    messages: [{ role: "user", content }],
    ...(tools.length && { tools: tools.map((of) => ({ type: "function", function: of })) }),
  };
  const said = (choice) => [
    choice.message.content || null,
    (choice.message.tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]),
    choice.finish_reason,
  ];
  const chatWhole = await openai.chat.completions.create(chat);
  const chatStream = await openai.chat.completions.stream(chat).finalChatCompletion();
  same(`chat, ${name}`, said(chatStream.choices[0]), said(chatWhole.choices[0]));

  const messages = {
    ...fixed,
    max_tokens: 200,
    messages: [{ role: "user", content }],
    ...(tools.length && { tools: tools.map((of) => ({ name: of.name, description: of.description, input_schema: of.parameters })) }),
  };
  const blocks = (message) => [
    message.content.map((block) => [block.type, block.text ?? block.thinking ?? [block.name, block.input]]),
    message.stop_reason,
    message.usage.output_tokens,
  ];
  const messagesWhole = await anthropic.messages.create(messages);
  const messagesStream = await anthropic.messages.stream(messages).finalMessage();
  same(`messages, ${name}`, blocks(messagesStream), blocks(messagesWhole));

  const responses = {
    ...fixed,
    max_output_tokens: 200,
    input: content,
    ...(tools.length && { tools: tools.map((of) => ({ type: "function", strict: false, ...of })) }),
  };
  const items = (answer) => [
    answer.output.map((item) => [item.type, item.content?.map((part) => part.text), item.name, item.arguments]),
    answer.status,
    answer.usage.output_tokens,
  ];
  const responsesWhole = await openai.responses.create(responses);
  const responsesStream = await openai.responses.stream(responses).finalResponse();
  same(`responses, ${name}`, items(responsesStream), items(responsesWhole));
}
