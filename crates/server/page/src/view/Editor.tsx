// Editing a message. A question is asked anew, beside the old one; a reply is corrected in place.

import { useSignal } from "@preact/signals";
import type { VNode } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Message } from "../state/conversation.ts";
import { ask, correct } from "./actions.ts";
import { editing, focusText } from "./layout.ts";

export function Editor({ message }: { message: Message }): VNode {
  const text = useSignal(message.content);
  const box = useRef<HTMLTextAreaElement>(null);
  const isQuestion = message.role === "user";
  // Before the box can be typed into: later, the caret would move under what is typed.
  useLayoutEffect(() => {
    box.current?.focus();
    box.current?.setSelectionRange(message.content.length, message.content.length);
  }, []);
  const close = (): void => {
    editing.value = null;
    focusText();
  };
  const done = (event: Event): void => {
    event.preventDefault();
    if (isQuestion && !text.value.trim() && message.files.length === 0) return;
    if (isQuestion) ask(text.value, message.files, message);
    else correct(message, text.value);
    close();
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
    if (event.key === "Enter" && !event.isComposing && (isQuestion ? !event.shiftKey : event.ctrlKey || event.metaKey)) done(event);
  };
  return (
    <form class="editor" onSubmit={done}>
      <textarea ref={box} aria-label="Text of the message" value={text.value} onInput={(event) => (text.value = event.currentTarget.value)} onKeyDown={onKeyDown} />
      <div class="buttons">
        <button type="button" class="plain" onClick={close}>
          Cancel
        </button>
        <button class="primary">{isQuestion ? "Ask again" : "Save"}</button>
      </div>
    </form>
  );
}
