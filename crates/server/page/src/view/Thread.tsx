// The shown conversation. It follows the reply while its end is in sight.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { model } from "../api/models.ts";
import { path, unanswered } from "../state/conversation.ts";
import { shown } from "../state/conversations.ts";
import { runs } from "../state/runs.ts";
import { Icon } from "./Icon.tsx";
import { MessageView } from "./MessageView.tsx";
import { setText } from "./Composer.tsx";

/** This near to the end counts as the end. */
const NEAR = 80;

export function Thread(): VNode {
  const place = useRef<HTMLDivElement>(null);
  const isAtEnd = useSignal(true);
  const conversation = shown.value;
  const messages = path(conversation);
  const left = unanswered(messages);
  const run = runs.value.get(conversation.id);
  const follow = (): void => {
    const element = place.current;
    if (element && isAtEnd.peek()) element.scrollTop = element.scrollHeight;
  };
  // A conversation that was opened, and a question that was asked, are shown from their end.
  useEffect(() => {
    isAtEnd.value = true;
    follow();
  }, [conversation.id, messages.length]);
  useEffect(follow);
  useSignalEffect(() => {
    void runs.value.get(shown.value.id)?.live.value;
    requestAnimationFrame(follow);
  });
  // Messages get their heights as they come into sight, and replies grow.
  useEffect(() => {
    const column = place.current?.firstElementChild;
    if (!column || typeof ResizeObserver === "undefined") return;
    const observer = new ResizeObserver(follow);
    observer.observe(column);
    return () => observer.disconnect();
  }, [conversation.id, messages.length > 0]);
  // Only a reader moves up; everything else moves the end.
  const lastTop = useRef(0);
  const onScroll = (): void => {
    const element = place.current;
    if (!element) return;
    if (element.scrollHeight - element.scrollTop - element.clientHeight < NEAR) isAtEnd.value = true;
    else if (element.scrollTop < lastTop.current) isAtEnd.value = false;
    lastTop.current = element.scrollTop;
  };
  return (
    <div class="thread-frame">
      <div id="thread" ref={place} onScroll={onScroll} tabIndex={0} role="region" aria-label="Messages">
        {messages.length === 0 ? (
          <Empty />
        ) : (
          <div class="column">
            {messages.map((message) => (
              <MessageView
                key={message.id}
                message={message}
                conversation={conversation}
                isLast={message === messages.at(-1)}
                isLeftOut={left.has(message.id)}
                run={run?.message === message.id ? run : null}
              />
            ))}
          </div>
        )}
      </div>
      {!isAtEnd.value && messages.length > 0 && (
        <button
          type="button"
          class="to-end icon"
          aria-label="Go to the last message"
          onClick={() => {
            isAtEnd.value = true;
            follow();
          }}
        >
          <Icon name="down" />
        </button>
      )}
    </div>
  );
}

const IDEAS = ["Explain how a hash table works", "Write a Python function that reverses a list", "What is 23 + 45?"];

function Empty(): VNode {
  return (
    <div class="empty">
      <h2>{model.value ? `Chat with ${model.value.id}` : "Hearth"}</h2>
      <p>Conversations stay in this browser. The model runs on this server.</p>
      <ul>
        {IDEAS.map((idea) => (
          <li key={idea}>
            <button type="button" class="idea" onClick={() => setText(idea)}>
              {idea}
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}
