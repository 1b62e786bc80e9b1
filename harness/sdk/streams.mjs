// Tests a server with Node's OpenAI and Anthropic SDKs: a stream that their parsers join must equal the plain
// response.
//
//   npm install openai @anthropic-ai/sdk        (in FOLDER; Node 22 or newer)
//   hearth serve &
//   node harness/sdk/streams.mjs [http://127.0.0.1:8000] [FOLDER]
//
// Prints one line per check; exits 1 at the first failed check.

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

function checkEqual(name, streamed, plain) {
  assert.deepEqual(streamed, plain, name);
  console.log(`ok ${name}`);
}

for (const [name, content, tools] of [["text", "Hello 👋", []], ["tool", prompt, [tool]]]) {
  const chat = {
    ...fixed,
    max_tokens: 200,
    messages: [{ role: "user", content }],
    ...(tools.length && { tools: tools.map((each) => ({ type: "function", function: each })) }),
  };
  const reply = (choice) => [
    choice.message.content || null,
    (choice.message.tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]),
    choice.finish_reason,
  ];
  const chatPlain = await openai.chat.completions.create(chat);
  const chatStream = await openai.chat.completions.stream(chat).finalChatCompletion();
  checkEqual(`chat, ${name}`, reply(chatStream.choices[0]), reply(chatPlain.choices[0]));

  const messages = {
    ...fixed,
    max_tokens: 200,
    messages: [{ role: "user", content }],
    ...(tools.length && {
      tools: tools.map(({ parameters, ...each }) => ({ ...each, input_schema: parameters })),
    }),
  };
  const blocks = (message) => [
    message.content.map((block) => [block.type, block.text ?? block.thinking ?? [block.name, block.input]]),
    message.stop_reason,
    message.usage.output_tokens,
  ];
  const messagesPlain = await anthropic.messages.create(messages);
  const messagesStream = await anthropic.messages.stream(messages).finalMessage();
  checkEqual(`messages, ${name}`, blocks(messagesStream), blocks(messagesPlain));

  const responses = {
    ...fixed,
    max_output_tokens: 200,
    input: content,
    ...(tools.length && { tools: tools.map((each) => ({ type: "function", strict: false, ...each })) }),
  };
  const items = (response) => [
    response.output.map((item) => {
      const texts = item.content?.map((part) => part.text);
      return [item.type, texts, item.name, item.arguments];
    }),
    response.status,
    response.usage.output_tokens,
  ];
  const responsesPlain = await openai.responses.create(responses);
  const responsesStream = await openai.responses.stream(responses).finalResponse();
  checkEqual(`responses, ${name}`, items(responsesStream), items(responsesPlain));
}
