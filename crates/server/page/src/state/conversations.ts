// The conversations that are open, the one that is shown, and the list of all. Changes are saved by themselves.

import { computed, signal, type Signal } from "@preact/signals";
import { emptyConversation, head, type Conversation, type Head } from "./conversation.ts";
import * as journal from "./journal.ts";
import { Saver } from "./saver.ts";
import { settings } from "./settings.ts";
import { openStorage, type Storage } from "./storage.ts";

export const heads = signal<Head[]>([]);
export const isKept = signal(true);
/** A sentence if the last save failed. */
export const saveFault = signal("");

const opened = new Map<string, Signal<Conversation>>();
const shownSignal = signal<Signal<Conversation>>(signal(emptyConversation(settings.value.system)));
export const shown = computed(() => shownSignal.value.value);
opened.set(shown.value.id, shownSignal.value);

const opening = openStorage();
let storage: Storage | null = null;
void opening.then((opened) => (storage = opened));
const saver = new Saver(async (conversation) => (storage ?? (await opening)).save(conversation), journal.forget);
/** Other tabs of this page, so that their lists stay right. */
const tabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("hearth");
/** Called before the page goes away, to hand in changes that are not in a conversation yet. */
export const beforeLeaving = new Set<() => void>();
/** Whether the page goes away: the browser ends its requests then. */
export let isLeaving = false;

export async function start(): Promise<void> {
  addEventListener("pageshow", () => (isLeaving = false));
  addEventListener("pagehide", () => {
    isLeaving = true;
    leave();
  });
  document.addEventListener("visibilitychange", () => document.visibilityState === "hidden" && leave());
  isKept.value = (await opening).isKept;
  if (isKept.value) await recover();
  await readHeads();
  tabs?.addEventListener("message", () => void readHeads());
  const wanted = new URLSearchParams(location.hash.slice(1)).get("chat");
  if (wanted) await open(wanted);
}

/** The page may be gone behind this, or go on. */
function leave(): void {
  for (const handIn of beforeLeaving) handIn();
  for (const conversation of saver.unsaved()) {
    journal.keep(conversation);
    void save(conversation);
  }
}

async function recover(): Promise<void> {
  try {
    const target = await opening;
    if (await journal.recover((conversation) => target.recover(conversation))) tabs?.postMessage("changed");
  } catch (thrown) {
    saveFault.value = notKept(thrown);
  }
}

async function readHeads(): Promise<void> {
  const stored = await (await opening).heads();
  const unsaved = saver.unsaved().map(head);
  heads.value = sorted([...stored.filter((one) => !unsaved.some((other) => other.id === one.id)), ...unsaved]);
}

const sorted = (list: Head[]): Head[] => list.sort((a, b) => b.updated - a.updated);

export async function load(id: string): Promise<Conversation | undefined> {
  return opened.get(id)?.value ?? (await opening).load(id);
}

/** Shows a conversation; false if there is none of this id. */
export async function open(id: string): Promise<boolean> {
  let entry = opened.get(id);
  if (!entry) {
    const found = await (await opening).load(id);
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

/** Changes an open conversation, which is saved at once. */
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
  void save(entry.value);
}

async function save(conversation: Conversation): Promise<void> {
  try {
    await saver.save(conversation);
    saveFault.value = "";
    tabs?.postMessage("changed");
  } catch (thrown) {
    saveFault.value = notKept(thrown);
  }
}

const notKept = (thrown: unknown): string =>
  `This browser could not keep the conversation: ${thrown instanceof Error ? thrown.message : String(thrown)}`;

/** Writes a conversation that is not open, for imports. */
export async function put(conversation: Conversation): Promise<void> {
  const entry = opened.get(conversation.id);
  if (entry) entry.value = conversation;
  await saver.save(conversation);
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
  saver.forget(id);
  opened.delete(id);
  journal.forgetAll(id);
  await (await opening).remove(id);
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
