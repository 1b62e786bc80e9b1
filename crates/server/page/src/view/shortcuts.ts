// Keys of the whole page. Those of the message box are in Composer.tsx.

import { shown } from "../state/conversations.ts";
import { path } from "../state/conversation.ts";
import { runs, stop } from "../state/runs.ts";
import { regenerate } from "./actions.ts";
import { dialog, focusText, isDrawerOpen, searchWanted } from "./layout.ts";
import { newChat } from "./Sidebar.tsx";

const isMac = /Mac|iPhone|iPad/.test(navigator.userAgent);
const control = isMac ? "⌘" : "Ctrl";

export const SHORTCUTS = [
  { keys: "Enter", does: "Send; with Shift, a new line" },
  { keys: "Esc", does: "Stop the reply" },
  { keys: "↑", does: "In an empty box: edit the last question" },
  { keys: `${control} Shift O`, does: "New chat" },
  { keys: `${control} K`, does: "Search conversations" },
  { keys: `${control} Shift Enter`, does: "New answer to the last question" },
  { keys: `${control} ,`, does: "Settings" },
  { keys: `${control} /`, does: "This help" },
  { keys: "Shift Esc", does: "To the message box" },
];

export function onKeyDown(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.isComposing) return;
  const held = isMac ? event.metaKey : event.ctrlKey;
  const key = event.key.toLowerCase();
  if (dialog.value !== null) return;
  if (key === "escape") {
    if (event.shiftKey) focusText();
    else if (isDrawerOpen.value) isDrawerOpen.value = false;
    else if (runs.value.has(shown.value.id)) {
      stop(shown.value.id);
      focusText();
    } else return;
  } else if (held && event.shiftKey && key === "o") newChat();
  else if (held && event.shiftKey && key === "enter") {
    const last = path(shown.value).at(-1);
    if (last) regenerate(last);
  } else if (held && key === "k") {
    isDrawerOpen.value = true;
    searchWanted.value += 1;
  } else if (held && key === ",") dialog.value = "settings";
  else if (held && key === "/") dialog.value = "help";
  else return;
  event.preventDefault();
}
