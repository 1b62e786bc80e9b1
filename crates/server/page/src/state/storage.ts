// Conversations in the browser's IndexedDB. Where the browser refuses that (some private modes), they are kept in
// memory, and `isKept` says so.

import { openDB, type DBSchema, type IDBPDatabase } from "idb";
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
  save(conversation: Conversation): Promise<void>;
  remove(id: string): Promise<void>;
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
  async save(conversation: Conversation): Promise<void> {
    const change = this.db.transaction(["conversations", "heads"], "readwrite");
    await Promise.all([
      change.objectStore("conversations").put(conversation),
      change.objectStore("heads").put(head(conversation)),
      change.done,
    ]);
  }
  async remove(id: string): Promise<void> {
    const change = this.db.transaction(["conversations", "heads"], "readwrite");
    await Promise.all([
      change.objectStore("conversations").delete(id),
      change.objectStore("heads").delete(id),
      change.done,
    ]);
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
