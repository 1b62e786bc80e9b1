// One chat completion: its request body and its stream of events.

import { EventSourceParserStream } from "eventsource-parser/stream";
import { Fault, faultFrom, faultOf, isAbort } from "./fault.ts";
import { request } from "./server.ts";
import type { Timings, Usage } from "./stats.ts";
import { questionText, unanswered, type Message } from "../state/conversation.ts";
import type { Settings } from "../state/settings.ts";

type Json = Record<string, unknown>;

/** The shown messages as the API takes them, without questions whose answer failed. */
export function apiMessages(system: string, messages: Message[]): Json[] {
  const left = unanswered(messages);
  const sent: Json[] = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (left.has(message.id)) continue;
    if (message.role === "user") sent.push({ role: "user", content: questionText(message) });
    else if (message.role === "tool") sent.push({ role: "tool", tool_call_id: message.callId, content: message.content });
    else sent.push(assistantMessage(message));
  }
  return sent;
}

function assistantMessage(message: Message): Json {
  const sent: Json = { role: "assistant", content: message.content };
  if (message.reasoning) sent["reasoning_content"] = message.reasoning;
  if (message.calls.length > 0) {
    sent["tool_calls"] = message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments || "{}" },
    }));
  }
  return sent;
}

/** The fields of the request that the user has set; nothing else is sent. */
export function chosenFields(settings: Settings): Json {
  const fields: Json = {};
  const numbers: [string, number | null][] = [
    ["temperature", settings.temperature],
    ["top_p", settings.topP],
    ["top_k", settings.topK],
    ["min_p", settings.minP],
    ["repetition_penalty", settings.repetitionPenalty],
    ["presence_penalty", settings.presencePenalty],
    ["frequency_penalty", settings.frequencyPenalty],
    ["max_tokens", settings.maxTokens],
    ["seed", settings.seed],
    ["thinking_budget_tokens", settings.thinkingBudget],
  ];
  for (const [name, value] of numbers) if (value !== null) fields[name] = value;
  if (settings.model) fields["model"] = settings.model;
  if (settings.thinking) fields["enable_thinking"] = settings.thinking === "on";
  if (settings.effort && settings.thinking !== "off") fields["reasoning_effort"] = settings.effort;
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length > 0) fields["stop"] = stop;
  if (settings.tools.trim()) fields["tools"] = parsedTools(settings.tools);
  return fields;
}

function parsedTools(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new Fault("refused", "The tools in the settings are not valid JSON. Correct them or leave them empty.");
  }
}

export interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

export interface Chunk {
  model?: string;
  choices: { delta: Delta; finish_reason: string | null }[];
  usage?: Usage | null;
  timings?: Timings;
  prompt_progress?: { total: number; cache: number; processed: number };
  error?: { message?: string; code?: string };
}

function parsedChunk(data: string): Chunk {
  try {
    return JSON.parse(data) as Chunk;
  } catch {
    throw new Fault("broken", "The server sent something that is no part of a reply. A proxy in between may have changed it.");
  }
}

/** Asks for a reply and yields its chunks. Throws a `Fault`, also when the stream ends early. */
export async function* complete(body: Json, signal: AbortSignal): AsyncGenerator<Chunk> {
  const response = await request("v1/chat/completions", {
    method: "POST",
    signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_progress: true }),
  });
  if (!response.body) throw new Fault("cut", "The server sent no reply.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Fault("cut", "The connection ended before the reply was complete.");
      if (value.data === "[DONE]") return;
      const chunk = parsedChunk(value.data);
      if (chunk.error) throw faultOf(chunk.error, null);
      yield chunk;
    }
  } catch (thrown) {
    if (isAbort(thrown) || thrown instanceof Fault) throw thrown;
    const fault = faultFrom(thrown);
    if (fault.kind === "unreachable") throw new Fault("cut", "The connection broke before the reply was complete.");
    throw fault;
  } finally {
    // A caller that leaves early, and an error, let go of the connection.
    reader.cancel().catch(() => undefined);
  }
}
