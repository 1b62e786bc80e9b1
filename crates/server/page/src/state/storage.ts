// Conversations in the browser's IndexedDB. Where the browser refuses that (some private modes), they are kept in
// memory, and `isKept` says so.

import { openDB, type DBSchema, type IDBPDatabase, type IDBPTransaction } from "idb";
import { head, type Conversation, type Head } from "./conversation.ts";

interface Schema extends DBSchema {
  conversations: { key: string; value: Conversation };
  /** The list is read without the texts. */
  heads: { key: string; value: Head };
}

export interface Storage {
  isKept: boolean;
  heads(): Promise<Head[]>;
  load(id: string): Promise<Conversation | undefined>;
  /** Resolves once it is stored for good. */
  save(conversation: Conversation): Promise<void>;
  /** Saves a version that was left over; a newer one that is stored stays. */
  recover(conversation: Conversation): Promise<void>;
  remove(id: string): Promise<void>;
}

type Change = IDBPTransaction<Schema, ("conversations" | "heads")[], "readwrite">;

async function put(change: Change, conversation: Conversation): Promise<void> {
  const ended = [change.objectStore("conversations").put(conversation), change.objectStore("heads").put(head(conversation)), change.done];
  // Without this the browser asks the page whether more follows, and a page that is closed meanwhile does not answer.
  change.commit();
  await Promise.all(ended);
}

class Database implements Storage {
  readonly isKept = true;
  constructor(private readonly db: IDBPDatabase<Schema>) {}

  heads(): Promise<Head[]> {
    return this.db.getAll("heads");
  }
  load(id: string): Promise<Conversation | undefined> {
    return this.db.get("conversations", id);
  }
  private change(): Change {
    return this.db.transaction(["conversations", "heads"], "readwrite");
  }
  async save(conversation: Conversation): Promise<void> {
    await put(this.change(), conversation);
  }
  async recover(conversation: Conversation): Promise<void> {
    const change = this.change();
    const stored = await change.objectStore("conversations").get(conversation.id);
    // Not every change counts as an update, so a version that is as old may be the newer one.
    if (stored && stored.updated > conversation.updated) return;
    await put(change, conversation);
  }
  async remove(id: string): Promise<void> {
    const change = this.change();
    const ended = [change.objectStore("conversations").delete(id), change.objectStore("heads").delete(id), change.done];
    change.commit();
    await Promise.all(ended);
  }
}

class Memory implements Storage {
  readonly isKept = false;
  private readonly all = new Map<string, Conversation>();

  async heads(): Promise<Head[]> {
    return [...this.all.values()].map(head);
  }
  async load(id: string): Promise<Conversation | undefined> {
    return this.all.get(id);
  }
  async save(conversation: Conversation): Promise<void> {
    this.all.set(conversation.id, conversation);
  }
  async recover(): Promise<void> {
    // Nothing can be moved into storage that ends with the tab.
  }
  async remove(id: string): Promise<void> {
    this.all.delete(id);
  }
}

export async function openStorage(): Promise<Storage> {
  try {
    const db = await openDB<Schema>("hearth", 1, {
      upgrade(db) {
        db.createObjectStore("conversations", { keyPath: "id" });
        db.createObjectStore("heads", { keyPath: "id" });
      },
    });
    return new Database(db);
  } catch {
    return new Memory();
  }
}
