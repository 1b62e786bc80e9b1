// Saves conversations as soon as they change, each one save behind the other. A conversation counts as unsaved until
// storage has confirmed the version that was handed in last.

import type { Conversation } from "./conversation.ts";

export class Saver {
  /** By conversation, the newest version that storage has not confirmed. */
  private readonly pending = new Map<string, Conversation>();
  /** By conversation, the saves that go on until nothing is pending. */
  private readonly running = new Map<string, Promise<void>>();

  /**
   * `write` resolves once the conversation is stored for good, and never throws instead of rejecting. It is called
   * within `save`, so that a page that goes away at once has begun to write. `onSaved` follows when nothing of a
   * conversation is pending any more.
   */
  constructor(
    private readonly write: (conversation: Conversation) => Promise<void>,
    private readonly onSaved: (id: string) => void,
  ) {}

  /** Resolves once this version, or a newer one, is stored. Rejects if storage refuses: it stays unsaved then. */
  save(conversation: Conversation): Promise<void> {
    const { id } = conversation;
    this.pending.set(id, conversation);
    const begun = this.running.get(id);
    if (begun) return begun;
    const run = this.writeAll(id, conversation);
    this.running.set(id, run);
    return run;
  }

  private async writeAll(id: string, first: Conversation): Promise<void> {
    try {
      for (let next: Conversation | undefined = first; next; next = this.pending.get(id)) {
        try {
          await this.write(next);
        } catch (thrown) {
          // A version that came meanwhile is tried too: it may be smaller.
          if (this.pending.get(id) === next) throw thrown;
          continue;
        }
        if (this.pending.get(id) === next) this.pending.delete(id);
      }
    } finally {
      this.running.delete(id);
    }
    this.onSaved(id);
  }

  unsaved(): Conversation[] {
    return [...this.pending.values()];
  }

  /** For a conversation that is removed: nothing of it is written any more. */
  forget(id: string): void {
    this.pending.delete(id);
  }
}
