// What the user can do with the shown conversation.

import { add, change, newMessage, path, versions, type Message, type TextFile } from "../state/conversation.ts";
import { edit, shown } from "../state/conversations.ts";
import { answer, runs } from "../state/runs.ts";

/** Asks a question at the end of the shown path, or beside `instead` as a new version of it. */
export function ask(content: string, files: TextFile[], instead?: Message): void {
  const { id } = shown.value;
  if (runs.value.has(id)) return;
  const last = path(shown.value).at(-1);
  const parent = instead ? instead.parent : (last?.id ?? null);
  const question = newMessage(parent, "user", { content, files });
  edit(id, (conversation) => add(conversation, question));
  void answer(id, question.id);
}

/** A further answer to the question before `message`. */
export function regenerate(message: Message): void {
  const { id } = shown.value;
  const before = message.role === "assistant" ? message.parent : message.id;
  if (before === null || runs.value.has(id)) return;
  void answer(id, before);
}

/** Gives the model the results of its tool calls. */
export function giveResults(message: Message, results: string[]): void {
  const { id } = shown.value;
  if (runs.value.has(id)) return;
  let parent = message.id;
  message.calls.forEach((call, at) => {
    const result = newMessage(parent, "tool", { content: results[at] ?? "", callId: call.id });
    edit(id, (conversation) => add(conversation, result));
    parent = result.id;
  });
  void answer(id, parent);
}

/** Shows the version `by` places after the shown one. */
export function stepVersion(message: Message, by: number): void {
  const all = versions(shown.value, message);
  const next = all[all.findIndex((one) => one.id === message.id) + by];
  if (next) edit(shown.value.id, (conversation) => ({ ...conversation, chosen: { ...conversation.chosen, [next.parent ?? ""]: next.id } }));
}

/** Changes the text of a reply in place, for people who correct the model. */
export function correct(message: Message, content: string): void {
  edit(shown.value.id, (conversation) => change(conversation, message.id, { content }));
}
