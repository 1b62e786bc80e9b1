// The list of conversations: search, rename, delete. On a phone it is a drawer.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { VNode } from "preact";
import { useRef } from "preact/hooks";
import type { Head } from "../state/conversation.ts";
import { heads, isKept, open, remove, rename, saveFault, search, shown, startNew } from "../state/conversations.ts";
import { runs } from "../state/runs.ts";
import { isDrawerOpen, dialog, focusText, searchWanted } from "./layout.ts";
import { Icon } from "./Icon.tsx";

/** The name of the time since a conversation was changed. */
function age(updated: number): string {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - 86_400_000) return "Yesterday";
  if (updated >= midnight - 7 * 86_400_000) return "Last seven days";
  return "Earlier";
}

export function Sidebar(): VNode {
  const words = useSignal("");
  const found = useSignal<Head[] | null>(null);
  const box = useRef<HTMLInputElement>(null);
  useSignalEffect(() => {
    const asked = words.value.trim();
    // A changed list is searched again.
    void heads.value;
    if (!asked) {
      found.value = null;
      return;
    }
    const timer = setTimeout(() => void search(asked).then((list) => asked === words.value.trim() && (found.value = list)), 150);
    return () => clearTimeout(timer);
  });
  useSignalEffect(() => {
    if (searchWanted.value > 0) box.current?.focus();
  });
  const list = found.value ?? heads.value;
  const groups = new Map<string, Head[]>();
  for (const one of list) groups.set(age(one.updated), [...(groups.get(age(one.updated)) ?? []), one]);
  return (
    <nav id="sidebar" class={isDrawerOpen.value ? "open" : ""} aria-label="Conversations">
      <div class="top">
        <button type="button" class="wide" onClick={newChat}>
          <Icon name="plus" /> New chat
        </button>
        <label class="search">
          <span class="unseen">Search conversations</span>
          <Icon name="search" />
          <input ref={box} type="search" placeholder="Search" value={words.value} onInput={(event) => (words.value = event.currentTarget.value)} />
        </label>
      </div>
      <div class="list">
        {[...groups].map(([name, entries]) => (
          <section key={name} aria-label={name}>
            <h2>{name}</h2>
            <ul>
              {entries.map((one) => (
                <Entry key={one.id} head={one} />
              ))}
            </ul>
          </section>
        ))}
        {list.length === 0 && <p class="none">{found.value ? "Nothing was found." : "Your conversations will be listed here."}</p>}
      </div>
      <div class="bottom">
        {!isKept.value && <p class="none">This browser keeps nothing for this page: conversations end with the tab.</p>}
        {saveFault.value && <p class="fault">{saveFault.value}</p>}
        <button type="button" class="plain" onClick={() => (dialog.value = "settings")}>
          <Icon name="gear" /> Settings
        </button>
        <button type="button" class="plain" onClick={() => (dialog.value = "help")}>
          <Icon name="help" /> Help
        </button>
      </div>
    </nav>
  );
}

export function newChat(): void {
  startNew();
  isDrawerOpen.value = false;
  focusText();
}

function Entry({ head }: { head: Head }): VNode {
  const mode = useSignal<"plain" | "rename" | "remove">("plain");
  const isShown = shown.value.id === head.id;
  if (mode.value === "rename") {
    const done = (event: Event): void => {
      event.preventDefault();
      const title = new FormData(event.currentTarget as HTMLFormElement).get("title");
      void rename(head.id, String(title));
      mode.value = "plain";
    };
    return (
      <li>
        <form class="rename" onSubmit={done}>
          <input name="title" aria-label="New name" defaultValue={head.title} ref={focusNow} onKeyDown={(event) => event.key === "Escape" && (mode.value = "plain")} />
          <button class="icon" aria-label="Save the name">
            <Icon name="check" />
          </button>
        </form>
      </li>
    );
  }
  if (mode.value === "remove") {
    return (
      <li class="ask">
        <span>Delete for good?</span>
        <button type="button" class="danger" ref={focusNow} onClick={() => void remove(head.id)}>
          Delete
        </button>
        <button type="button" class="plain" onClick={() => (mode.value = "plain")}>
          Keep
        </button>
      </li>
    );
  }
  const show = async (): Promise<void> => {
    await open(head.id);
    isDrawerOpen.value = false;
    focusText();
  };
  return (
    <li class={isShown ? "shown" : ""}>
      <button type="button" class="title" aria-current={isShown ? "true" : undefined} onClick={() => void show()} title={head.title}>
        {runs.value.has(head.id) && <span class="dot" role="img" aria-label="being answered" />}
        {head.title || "New chat"}
      </button>
      <button type="button" class="icon" aria-label={`Rename ${head.title}`} onClick={() => (mode.value = "rename")}>
        <Icon name="pencil" />
      </button>
      <button type="button" class="icon" aria-label={`Delete ${head.title}`} onClick={() => (mode.value = "remove")}>
        <Icon name="trash" />
      </button>
    </li>
  );
}

function focusNow(element: HTMLElement | null): void {
  element?.focus();
}
