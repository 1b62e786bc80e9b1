// The conversations that are open, the one that is shown, and the list of all. Changes are saved by themselves.

import { computed, signal, type Signal } from "@preact/signals";
import { emptyConversation, head, type Conversation, type Head } from "./conversation.ts";
import { settings } from "./settings.ts";
import { openStorage, type Storage } from "./storage.ts";

/** Changes within this time are saved as one. */
const SAVE_MS = 30;

export const heads = signal<Head[]>([]);
export const isKept = signal(true);
/** A sentence if the last save failed. */
export const saveFault = signal("");

const opened = new Map<string, Signal<Conversation>>();
const shownSignal = signal<Signal<Conversation>>(signal(emptyConversation(settings.value.system)));
export const shown = computed(() => shownSignal.value.value);
opened.set(shown.value.id, shownSignal.value);

let storage: Storage | null = null;
const unsaved = new Map<string, ReturnType<typeof setTimeout>>();
/** Other tabs of this page, so that their lists stay right. */
const tabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("hearth");

export async function start(): Promise<void> {
  storage = await openStorage();
  isKept.value = storage.isKept;
  await readHeads();
  tabs?.addEventListener("message", () => void readHeads());
  const flush = (): void => [...unsaved.keys()].forEach((id) => void save(id));
  addEventListener("pagehide", flush);
  document.addEventListener("visibilitychange", () => document.visibilityState === "hidden" && flush());
  const wanted = new URLSearchParams(location.hash.slice(1)).get("chat");
  if (wanted) await open(wanted);
}

async function readHeads(): Promise<void> {
  if (storage) heads.value = sorted(await storage.heads());
}

const sorted = (list: Head[]): Head[] => list.sort((a, b) => b.updated - a.updated);

export async function load(id: string): Promise<Conversation | undefined> {
  return opened.get(id)?.value ?? (await storage?.load(id));
}

/** Shows a conversation; false if there is none of this id. */
export async function open(id: string): Promise<boolean> {
  let entry = opened.get(id);
  if (!entry) {
    const found = await storage?.load(id);
    if (!found) return false;
    entry = signal(settled(found));
    opened.set(id, entry);
  }
  show(entry);
  return true;
}

/** A reply that was running when the page was closed will not go on. */
function settled(conversation: Conversation): Conversation {
  const messages = { ...conversation.messages };
  for (const message of Object.values(messages)) {
    if (message.state === "running") messages[message.id] = { ...message, state: "stopped" };
  }
  return { ...conversation, messages };
}

function show(entry: Signal<Conversation>): void {
  shownSignal.value = entry;
  const kept = heads.value.some((one) => one.id === entry.value.id);
  history.replaceState(null, "", `${location.pathname}${location.search}${kept ? `#chat=${entry.value.id}` : ""}`);
}

export function startNew(): void {
  const entry = signal(emptyConversation(settings.value.system));
  opened.set(entry.value.id, entry);
  show(entry);
}

/** Changes an open conversation; it is saved soon after. */
export function edit(id: string, change: (conversation: Conversation) => Conversation): void {
  const entry = opened.get(id);
  if (!entry) return;
  entry.value = change(entry.value);
  if (Object.keys(entry.value.messages).length === 0) return;
  const line = head(entry.value);
  const known = heads.value.find((one) => one.id === id);
  if (!known || known.title !== line.title || line.updated - known.updated > 5000) {
    heads.value = sorted([...heads.value.filter((one) => one.id !== id), line]);
    if (id === shown.value.id) show(entry);
  }
  if (!unsaved.has(id)) unsaved.set(id, setTimeout(() => void save(id), SAVE_MS));
}

async function save(id: string): Promise<void> {
  clearTimeout(unsaved.get(id));
  unsaved.delete(id);
  const entry = opened.get(id);
  if (!entry || !storage) return;
  try {
    await storage.save(entry.value);
    saveFault.value = "";
    tabs?.postMessage("changed");
  } catch (thrown) {
    const reason = thrown instanceof Error ? thrown.message : String(thrown);
    saveFault.value = `This browser could not keep the conversation: ${reason}`;
  }
}

/** Writes a conversation that is not open, for imports. */
export async function put(conversation: Conversation): Promise<void> {
  const entry = opened.get(conversation.id);
  if (entry) entry.value = conversation;
  await storage?.save(conversation);
  heads.value = sorted([...heads.value.filter((one) => one.id !== conversation.id), head(conversation)]);
  tabs?.postMessage("changed");
}

/** Renames by hand; an empty title is not taken. */
export async function rename(id: string, title: string): Promise<void> {
  const conversation = await load(id);
  if (!conversation || !title.trim()) return;
  await put({ ...conversation, title: title.trim(), named: true });
}

export async function remove(id: string): Promise<void> {
  clearTimeout(unsaved.get(id));
  unsaved.delete(id);
  opened.delete(id);
  await storage?.remove(id);
  heads.value = heads.value.filter((one) => one.id !== id);
  if (shown.value.id === id) startNew();
  tabs?.postMessage("changed");
}

/** The conversations that have `words` in their title or in a message. */
export async function search(words: string): Promise<Head[]> {
  const wanted = words.toLocaleLowerCase().split(/\s+/).filter(Boolean);
  const found: Head[] = [];
  for (const one of heads.value) {
    const conversation = await load(one.id);
    if (!conversation) continue;
    const texts = Object.values(conversation.messages).map((message) => message.content);
    const all = [conversation.title, ...texts].join("\n").toLocaleLowerCase();
    if (wanted.every((word) => all.includes(word))) found.push(one);
  }
  return found;
}
