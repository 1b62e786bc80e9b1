// Conversations as files: one as Markdown for people, all as JSON to keep or to move.

import { heads, load, put } from "./conversations.ts";
import { newId, path, type Conversation, type Message } from "./conversation.ts";

const FORMAT = "hearth-conversations";

export function download(name: string, kind: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export async function exportAll(): Promise<string> {
  const conversations: Conversation[] = [];
  for (const one of heads.value) {
    const conversation = await load(one.id);
    if (conversation) conversations.push(conversation);
  }
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** The shown messages of a conversation. */
export function markdown(conversation: Conversation): string {
  const parts = [`# ${conversation.title || "Chat"}`];
  if (conversation.system) parts.push(`> ${conversation.system.replace(/\n/g, "\n> ")}`);
  for (const message of path(conversation)) {
    const who = message.role === "user" ? "You" : message.role === "tool" ? "Tool result" : (message.model ?? "Assistant");
    parts.push(`## ${who}`);
    for (const file of message.files) parts.push(`*Attached: ${file.name}*`);
    if (message.content) parts.push(message.content);
    for (const call of message.calls) parts.push(`\`${call.name}(${call.arguments})\``);
  }
  return `${parts.join("\n\n")}\n`;
}

const text = (value: unknown): string => (typeof value === "string" ? value : "");
const time = (value: unknown): number => (typeof value === "number" && Number.isFinite(value) ? value : Date.now());

function checkedMessage(value: unknown): Message | null {
  const from = value as Partial<Message> | null;
  const role = from?.role;
  if (typeof from?.id !== "string" || (role !== "user" && role !== "assistant" && role !== "tool")) return null;
  const list = <T>(items: unknown, take: (item: Record<string, unknown>) => T): T[] =>
    Array.isArray(items) ? items.filter((item) => typeof item === "object" && item !== null).map(take) : [];
  return {
    id: from.id,
    parent: typeof from.parent === "string" ? from.parent : null,
    role,
    content: text(from.content),
    reasoning: text(from.reasoning),
    thinkingMs: typeof from.thinkingMs === "number" ? from.thinkingMs : null,
    calls: list(from.calls, (call) => ({ id: text(call["id"]), name: text(call["name"]), arguments: text(call["arguments"]) })),
    callId: typeof from.callId === "string" ? from.callId : null,
    files: list(from.files, (file) => ({ name: text(file["name"]), text: text(file["text"]) })),
    created: time(from.created),
    model: typeof from.model === "string" ? from.model : null,
    state: from.state === "stopped" || from.state === "failed" ? from.state : "done",
    fault: null,
    // Figures are shown, not computed with; a foreign shape is left out.
    stats: null,
  };
}

function checkedConversation(value: unknown): Conversation | null {
  const from = value as Partial<Conversation> | null;
  if (typeof from?.id !== "string" || typeof from.messages !== "object" || from.messages === null) return null;
  const messages: Record<string, Message> = {};
  for (const entry of Object.values(from.messages)) {
    const message = checkedMessage(entry);
    if (message) messages[message.id] = message;
  }
  const chosen: Record<string, string> = {};
  for (const [parent, child] of Object.entries(from.chosen ?? {})) {
    if (typeof child === "string" && messages[child]) chosen[parent] = child;
  }
  if (Object.keys(messages).length === 0) return null;
  return {
    id: from.id,
    title: text(from.title) || "Imported chat",
    named: from.named === true,
    created: time(from.created),
    updated: time(from.updated),
    system: text(from.system),
    messages,
    chosen,
  };
}

/** Reads an exported file. One that is already here and differs is kept beside it. Throws a sentence. */
export async function importAll(source: string): Promise<number> {
  let parsed: unknown;
  try {
    parsed = JSON.parse(source);
  } catch {
    throw new Error("This file is not JSON. Choose a file that this page has exported.");
  }
  const file = parsed as { format?: unknown; conversations?: unknown } | null;
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file holds no conversations of this page. Choose a file that this page has exported.");
  }
  let taken = 0;
  for (const entry of file.conversations) {
    const conversation = checkedConversation(entry);
    if (!conversation) continue;
    const here = await load(conversation.id);
    if (here && here.updated !== conversation.updated) conversation.id = newId();
    if (!here || here.id !== conversation.id) await put(conversation);
    taken += 1;
  }
  if (taken === 0) throw new Error("This file holds no conversations.");
  return taken;
}
