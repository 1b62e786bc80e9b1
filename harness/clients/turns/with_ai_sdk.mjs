// The AI SDK: `with_ai_sdk.mjs URL plain|streamed|tool` prints the model's reply through each of its three
// providers: chat completions, Responses and messages.
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, mode] = process.argv.slice(2);
const require = createRequire(`${process.env.CLIENT_PACKAGES}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, stepCountIs, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const own = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  "openai (Responses)": createOpenAI(own).responses("hearth"),
  "openai (chat)": createOpenAI(own).chat("hearth"),
  anthropic: createAnthropic(own)("hearth"),
  "openai-compatible": createOpenAICompatible({ name: "hearth", includeUsage: true, ...own })("hearth"),
};
const readNote = tool({
  description: "Reads a note",
  inputSchema: z.object({ name: z.string() }),
  execute: ({ name }) => readFile(name, "utf8"),
});

for (const [provider, model] of Object.entries(models)) {
  const shared = { model, maxRetries: 0, maxOutputTokens: 1024 };
  if (mode === "plain") {
    const reply = await generateText({ ...shared, prompt: "Say hello." });
    if (!(reply.usage.outputTokens > 0)) throw new Error(`${provider}: no usage`);
    console.log(reply.text);
    continue;
  }
  const tools = { tools: { read_note: readNote }, stopWhen: stepCountIs(3) };
  const asks =
    mode === "tool" ? { prompt: "Please read the note with name note", ...tools } : { prompt: "Say hello." };
  const failures = [];
  const reply = streamText({ ...shared, ...asks, onError: ({ error }) => failures.push(error) });
  let text = "";
  for await (const part of reply.textStream) text += part;
  if (failures.length) throw failures[0];
  if (!((await reply.totalUsage).outputTokens > 0)) throw new Error(`${provider}: no usage`);
  if (mode === "tool") {
    const results = (await reply.steps).flatMap((step) => step.toolResults);
    if (!results.length) throw new Error(`${provider}: no tool was called`);
  }
  console.log(text);
}
