// What is open on the page, and where the focus goes.

import { signal } from "@preact/signals";

export const isDrawerOpen = signal(false);
export const dialog = signal<"settings" | "help" | "key" | null>(null);
/** Counts up when the search box is to be focused. */
export const searchWanted = signal(0);
/** The message that is being edited. */
export const editing = signal<string | null>(null);

/** Puts the focus where the next message is typed. */
export function focusText(): void {
  // After the change that hid the focused element.
  requestAnimationFrame(() => document.getElementById("text")?.focus());
}
