// One message with what can be done with it.

import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";
import { duration } from "../api/stats.ts";
import { Markdown } from "../markdown/Markdown.tsx";
import { versions, type Conversation, type Message } from "../state/conversation.ts";
import { goOn, runs, type Live, type Run } from "../state/runs.ts";
import { regenerate, stepVersion } from "./actions.ts";
import { CopyButton } from "./CopyButton.tsx";
import { Editor } from "./Editor.tsx";
import { Figures } from "./Figures.tsx";
import { Icon } from "./Icon.tsx";
import { dialog, editing, focusText } from "./layout.ts";
import { ToolCalls } from "./ToolCalls.tsx";

interface Props {
  message: Message;
  conversation: Conversation;
  isLast: boolean;
  isLeftOut: boolean;
  run: Run | null;
}

export function MessageView(props: Props): VNode {
  const { message } = props;
  if (editing.value === message.id) {
    return (
      <article class={`message ${message.role}`} aria-label="Edit the message">
        <Editor message={message} />
      </article>
    );
  }
  if (message.role === "user") return <Question {...props} />;
  if (message.role === "tool") return <ToolResult {...props} />;
  return <Reply {...props} />;
}

function Question({ message, conversation, isLeftOut }: Props): VNode {
  return (
    <article class="message user" aria-label="You">
      <h2 class="unseen">You</h2>
      <div class={isLeftOut ? "bubble left-out" : "bubble"}>
        {message.files.map((file) => (
          <details class="file" key={file.name}>
            <summary>
              <Icon name="file" /> {file.name}
            </summary>
            <pre tabIndex={0}>{file.text}</pre>
          </details>
        ))}
        {message.content}
      </div>
      {isLeftOut && <p class="note">Not answered. Later messages are sent without it.</p>}
      <Actions message={message} conversation={conversation} />
    </article>
  );
}

function ToolResult({ message }: Props): VNode {
  return (
    <article class="message tool" aria-label="Tool result">
      <details class="fold">
        <summary>
          <Icon name="tool" /> Result given to the model
        </summary>
        <pre tabIndex={0}>{message.content}</pre>
      </details>
    </article>
  );
}

function Reply({ message, conversation, isLast, run }: Props): VNode {
  const live: Live | null = run?.live.value ?? null;
  const content = live?.content ?? message.content;
  const reasoning = live?.reasoning ?? message.reasoning;
  const calls = live?.calls ?? message.calls;
  return (
    <article class="message assistant" aria-label={message.model ?? "Reply"} aria-busy={run ? "true" : undefined}>
      <h2 class="unseen">{message.model ?? "Reply"}</h2>
      {reasoning && <Thinking text={reasoning} ms={message.thinkingMs} run={live?.phase === "thinking" ? run : null} />}
      {content && <Markdown text={content} isComplete={!live} />}
      {calls.length > 0 && <ToolCalls message={message} calls={calls} canAnswer={isLast && !live && message.state === "done"} />}
      {run && live && !content && live.phase !== "thinking" && <Waiting run={run} live={live} />}
      {message.state === "stopped" && !run && <p class="note">You stopped this reply.</p>}
      {message.fault && <FaultNote message={message} />}
      {!live && (
        <footer>
          <Actions message={message} conversation={conversation} />
          {isLast && wasCut(message) && (
            <button type="button" class="plain small" onClick={() => void goOn(conversation.id, message)}>
              Continue
            </button>
          )}
          {message.stats && <Figures stats={message.stats} />}
        </footer>
      )}
    </article>
  );
}

/** Whether the model can go on where the reply ends. */
function wasCut(message: Message): boolean {
  const isPart = message.state !== "done" || message.stats?.reason === "length";
  return isPart && message.content !== "" && message.calls.length === 0;
}

/** Seconds since the reply was asked for, counted up. */
function useSeconds(began: number): number {
  const [now, setNow] = useState(() => performance.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), 500);
    return () => clearInterval(timer);
  }, []);
  return Math.max(0, now - began);
}

function Waiting({ run, live }: { run: Run; live: Live }): VNode {
  const ms = useSeconds(run.began);
  const what = live.phase === "reading" ? "Reading the conversation" : "Waiting for the server";
  const share = live.progress !== null && live.progress < 1 ? ` · ${Math.round(live.progress * 100)} %` : "";
  return (
    <p class="waiting">
      <span class="pulse" aria-hidden="true" /> {what}
      {share}
      {ms > 2000 ? ` · ${duration(ms)}` : ""}
    </p>
  );
}

function Thinking({ text, ms, run }: { text: string; ms: number | null; run: Run | null }): VNode {
  return (
    <details class="fold thinking">
      <summary>
        {run ? <ThinkingTime run={run} /> : ms === null ? "Thoughts" : ms < 1000 ? "Thought briefly" : `Thought for ${duration(ms)}`}
      </summary>
      <pre tabIndex={0}>{text}</pre>
    </details>
  );
}

function ThinkingTime({ run }: { run: Run }): VNode {
  const ms = useSeconds(run.began);
  return (
    <>
      <span class="pulse" aria-hidden="true" /> Thinking{ms > 1000 ? ` · ${Math.floor(ms / 1000)} s` : ""}
    </>
  );
}

function FaultNote({ message }: { message: Message }): VNode {
  const fault = message.fault;
  return (
    <div class="fault" role="alert">
      <p>{fault?.text}</p>
      <button type="button" onClick={() => regenerate(message)}>
        <Icon name="retry" /> Try again
      </button>
      {fault?.kind === "key" && (
        <button type="button" onClick={() => (dialog.value = "key")}>
          Enter the API key
        </button>
      )}
    </div>
  );
}

function Actions({ message, conversation }: { message: Message; conversation: Conversation }): VNode {
  const all = versions(conversation, message);
  const at = all.findIndex((one) => one.id === message.id);
  const busy = runs.value.has(conversation.id);
  const again = (): void => {
    regenerate(message);
    focusText();
  };
  return (
    <div class="actions">
      {all.length > 1 && (
        <span class="versions">
          <button type="button" class="icon" aria-label="Earlier version" disabled={at === 0 || busy} onClick={() => stepVersion(message, -1)}>
            <Icon name="left" />
          </button>
          <span aria-label={`Version ${at + 1} of ${all.length}`}>
            {at + 1}/{all.length}
          </span>
          <button type="button" class="icon" aria-label="Later version" disabled={at === all.length - 1 || busy} onClick={() => stepVersion(message, 1)}>
            <Icon name="right" />
          </button>
        </span>
      )}
      {message.content !== "" && <CopyButton text={message.content} label="Copy message" />}
      {(message.content !== "" || message.role === "user") && (
        <button type="button" class="icon" aria-label="Edit message" title="Edit message" disabled={busy} onClick={() => (editing.value = message.id)}>
          <Icon name="pencil" />
        </button>
      )}
      {message.fault === null && message.role === "assistant" && (
        <button type="button" class="icon" aria-label="New answer" title="New answer" disabled={busy} onClick={again}>
          <Icon name="retry" />
        </button>
      )}
    </div>
  );
}
