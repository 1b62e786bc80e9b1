// What storage has not confirmed when a page goes away: IndexedDB takes time, which a page that is closed does not have,
// but the browser's small storage is written at once. The next start moves it into storage. Each tab writes keys of its
// own, so that tabs do not replace each other's versions.

import { newId, type Conversation } from "./conversation.ts";
import { keys, read, write } from "./local.ts";

const PREFIX = "hearth.unsaved.";
const tab = newId();
const mine = new Set<string>();

const keyOf = (id: string): string => `${PREFIX}${id}.${tab}`;

/** Does nothing where the space is used up. */
export function keep(conversation: Conversation): void {
  mine.add(conversation.id);
  write(keyOf(conversation.id), JSON.stringify(conversation));
}

/** Forgets what this tab has kept of a conversation. */
export function forget(id: string): void {
  if (mine.delete(id)) write(keyOf(id), null);
}

/** Forgets what any tab has kept of a conversation, which is removed. */
export function forgetAll(id: string): void {
  mine.delete(id);
  for (const key of keys(`${PREFIX}${id}.`)) write(key, null);
}

/** Hands all that earlier pages have kept to `take`; what it has stored is forgotten. Tells whether there was any. */
export async function recover(take: (conversation: Conversation) => Promise<void>): Promise<boolean> {
  const found = keys(PREFIX);
  for (const key of found) {
    const text = read(key);
    const conversation = parsed(text);
    if (conversation) await take(conversation);
    // Another tab may live and have written a newer version since.
    if (read(key) === text) write(key, null);
  }
  return found.length > 0;
}

function parsed(text: string | null): Conversation | null {
  try {
    const found = JSON.parse(text ?? "null") as Partial<Conversation> | null;
    const fits = typeof found?.id === "string" && typeof found.updated === "number" && typeof found.messages === "object";
    return fits && found.messages !== null ? (found as Conversation) : null;
  } catch {
    return null;
  }
}
