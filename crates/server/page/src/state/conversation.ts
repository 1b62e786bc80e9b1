// A conversation is a tree: an edited question or a new answer is a further child of the same parent, so that no
// version is lost. `chosen` says which child is shown. All functions return a new conversation.

import type { FaultKind } from "../api/fault.ts";
import type { ReplyStats } from "../api/stats.ts";

export interface TextFile {
  name: string;
  text: string;
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON text as the model wrote it; it may be incomplete. */
  arguments: string;
}

export interface Message {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  reasoning: string;
  thinkingMs: number | null;
  calls: ToolCall[];
  /** The call that a tool message answers. */
  callId: string | null;
  files: TextFile[];
  created: number;
  model: string | null;
  state: "running" | "done" | "stopped" | "failed";
  fault: { kind: FaultKind; text: string } | null;
  stats: ReplyStats | null;
}

export interface Conversation {
  id: string;
  title: string;
  /** Whether the user named it; else the title is made from the first question. */
  named: boolean;
  created: number;
  updated: number;
  /** Instructions for the model, sent as the system message; empty for none. */
  system: string;
  messages: Record<string, Message>;
  /** The shown child of each message; the key of the first level is the empty string. */
  chosen: Record<string, string>;
}

/** What the list of conversations shows. */
export interface Head {
  id: string;
  title: string;
  updated: number;
}

export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function emptyConversation(system: string): Conversation {
  const now = Date.now();
  return { id: newId(), title: "", named: false, created: now, updated: now, system, messages: {}, chosen: {} };
}

export function newMessage(parent: string | null, role: Message["role"], fields: Partial<Message> = {}): Message {
  return {
    id: newId(),
    parent,
    role,
    content: "",
    reasoning: "",
    thinkingMs: null,
    calls: [],
    callId: null,
    files: [],
    created: Date.now(),
    model: null,
    state: "done",
    fault: null,
    stats: null,
    ...fields,
  };
}

export function head(conversation: Conversation): Head {
  const { id, title, updated } = conversation;
  return { id, title, updated };
}

/** The shown messages from the first to the last. */
export function path(conversation: Conversation): Message[] {
  const messages: Message[] = [];
  let next = conversation.chosen[""];
  while (next !== undefined) {
    const message = conversation.messages[next];
    // A loop can only come from an imported file.
    if (!message || messages.includes(message)) break;
    messages.push(message);
    next = conversation.chosen[message.id];
  }
  return messages;
}

/** All versions that stand where `message` stands, oldest first. */
export function versions(conversation: Conversation, message: Message): Message[] {
  return Object.values(conversation.messages)
    .filter((other) => other.parent === message.parent && other.role === message.role)
    .sort((a, b) => a.created - b.created || a.id.localeCompare(b.id));
}

/** Adds a message and shows it. */
export function add(conversation: Conversation, message: Message): Conversation {
  const messages = { ...conversation.messages, [message.id]: message };
  const chosen = { ...conversation.chosen, [message.parent ?? ""]: message.id };
  const isFirst = message.role === "user" && !conversation.named && conversation.title === "";
  const title = isFirst ? titleOf(message) : conversation.title;
  return { ...conversation, messages, chosen, title, updated: message.created };
}

export function change(conversation: Conversation, id: string, fields: Partial<Message>): Conversation {
  const message = conversation.messages[id];
  if (!message) return conversation;
  return { ...conversation, messages: { ...conversation.messages, [id]: { ...message, ...fields } }, updated: Date.now() };
}

export function choose(conversation: Conversation, message: Message): Conversation {
  return { ...conversation, chosen: { ...conversation.chosen, [message.parent ?? ""]: message.id } };
}

/** The first words of a question. */
function titleOf(message: Message): string {
  const line = message.content.trim().split("\n")[0]?.replace(/\s+/g, " ") || message.files[0]?.name || "New chat";
  if (line.length <= 60) return line;
  const cut = line.slice(0, 60);
  return `${cut.slice(0, cut.lastIndexOf(" ") > 30 ? cut.lastIndexOf(" ") : 60)}…`;
}

/** A question with the files that belong to it, as the model reads it. */
export function questionText(message: Message): string {
  const files = message.files.map((file) => {
    // The fence is longer than any run of backticks in the file.
    const runs = file.text.match(/`{3,}/g) ?? [];
    const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
    return `File ${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, message.content].filter((part) => part !== "").join("\n\n");
}

function isAnswered(message: Message): boolean {
  return message.content !== "" || message.reasoning !== "" || message.calls.length > 0 || message.state === "done";
}

/** The questions on the way to `last` whose answer failed: the model does not get them. */
export function unanswered(messages: Message[]): Set<string> {
  const left = new Set<string>();
  messages.forEach((message, at) => {
    if (message.role !== "assistant" || message.state === "running" || isAnswered(message)) return;
    left.add(message.id);
    const question = messages[at - 1];
    if (question?.role === "user") left.add(question.id);
  });
  return left;
}
