// Where a message is typed: text, attached files, send and stop. What is typed is kept until it is sent.

import { signal, useSignalEffect } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { model } from "../api/models.ts";
import { number } from "../api/stats.ts";
import { path, type TextFile } from "../state/conversation.ts";
import { shown } from "../state/conversations.ts";
import { readText } from "../state/files.ts";
import { read, write } from "../state/local.ts";
import { runs, stop } from "../state/runs.ts";
import { ask } from "./actions.ts";
import { Icon } from "./Icon.tsx";
import { editing, focusText } from "./layout.ts";

const DRAFT = "hearth.draft";

const text = signal(read(DRAFT, "session") ?? "");
const files = signal<TextFile[]>([]);
const fileFault = signal("");

export function setText(value: string): void {
  text.value = value;
  write(DRAFT, value || null, "session");
  focusText();
}

/** Attaches files; those that are no text are named. */
export async function attach(list: Iterable<File>): Promise<void> {
  fileFault.value = "";
  for (const file of list) {
    try {
      const read = await readText(file);
      files.value = [...files.value.filter((one) => one.name !== read.name), read];
    } catch (thrown) {
      fileFault.value = (thrown as Error).message;
    }
  }
  focusText();
}

function send(): void {
  const content = text.value.trim();
  if ((!content && files.value.length === 0) || runs.value.has(shown.value.id)) return;
  ask(content, files.value);
  files.value = [];
  fileFault.value = "";
  setText("");
}

export function Composer(): VNode {
  const box = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const isRunning = runs.value.has(shown.value.id);
  useEffect(() => box.current?.focus(), []);
  useSignalEffect(() => {
    void text.value;
    grow(box.current);
  });
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
    if (event.key === "ArrowUp" && text.value === "" && !isRunning) {
      const last = path(shown.value).findLast((message) => message.role === "user");
      if (last) {
        event.preventDefault();
        editing.value = last.id;
      }
    }
  };
  const onPaste = (event: ClipboardEvent): void => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (pasted.length === 0) return;
    event.preventDefault();
    void attach(pasted);
  };
  const onSubmit = (event: Event): void => {
    event.preventDefault();
    send();
  };
  return (
    <form id="composer" onSubmit={onSubmit}>
      {fileFault.value && (
        <p class="fault" role="alert">
          {fileFault.value}
        </p>
      )}
      {files.value.length > 0 && (
        <ul class="chips" aria-label="Attached files">
          {files.value.map((file) => (
            <li key={file.name}>
              <Icon name="file" /> {file.name}
              <button type="button" class="icon" aria-label={`Remove ${file.name}`} onClick={() => (files.value = files.value.filter((one) => one !== file))}>
                <Icon name="close" />
              </button>
            </li>
          ))}
        </ul>
      )}
      <div class="box">
        <button type="button" class="icon" aria-label="Attach text files" title="Attach text files" onClick={() => picker.current?.click()}>
          <Icon name="clip" />
        </button>
        <input
          ref={picker}
          type="file"
          multiple
          hidden
          aria-label="Text files"
          onChange={(event) => {
            void attach([...(event.currentTarget.files ?? [])]);
            event.currentTarget.value = "";
          }}
        />
        <textarea
          id="text"
          ref={box}
          rows={1}
          placeholder="Write a message"
          aria-label="Message"
          value={text.value}
          onInput={(event) => {
            text.value = event.currentTarget.value;
            write(DRAFT, text.value || null, "session");
          }}
          onKeyDown={onKeyDown}
          onPaste={onPaste}
        />
        {isRunning ? (
          <button
            type="button"
            id="stop"
            class="primary round"
            aria-label="Stop the reply"
            title="Stop (Esc)"
            onClick={() => {
              stop(shown.value.id);
              focusText();
            }}
          >
            <Icon name="stop" />
          </button>
        ) : (
          <button id="send" class="primary round" aria-label="Send" title="Send (Enter)" disabled={!text.value.trim() && files.value.length === 0}>
            <Icon name="send" />
          </button>
        )}
      </div>
      <ContextMeter />
    </form>
  );
}

function grow(box: HTMLTextAreaElement | null): void {
  if (!box) return;
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

/** How much of what the model can read this conversation takes, as of its last reply. */
function ContextMeter(): VNode {
  const most = model.value?.context_length;
  const usage = path(shown.value).findLast((message) => message.stats?.usage)?.stats?.usage;
  const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  if (!most) return <p class="meter" />;
  const share = Math.min(1, used / most);
  const said = used === 0 ? `Room for ${number(most)} tokens` : `${number(used)} of ${number(most)} tokens of context used`;
  return (
    <p class={share > 0.9 ? "meter full" : "meter"}>
      <meter min={0} max={most} high={most * 0.9} value={Math.min(used, most)} aria-label="Context used">
        {said}
      </meter>
      <span>{said}</span>
      {share > 0.9 && <b>Nearly full: start a new chat soon.</b>}
    </p>
  );
}
