// The calls that a reply makes. This page runs no tool: the user gives the results.

import type { VNode } from "preact";
import { CodeBlock } from "../markdown/CodeBlock.tsx";
import type { Message, ToolCall } from "../state/conversation.ts";
import { giveResults } from "./actions.ts";
import { Icon } from "./Icon.tsx";
import { focusText } from "./layout.ts";

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is still being written.
    return text;
  }
}

export function ToolCalls({ message, calls, canAnswer }: { message: Message; calls: ToolCall[]; canAnswer: boolean }): VNode {
  const done = (event: Event): void => {
    event.preventDefault();
    const form = new FormData(event.currentTarget as HTMLFormElement);
    giveResults(
      message,
      calls.map((_, at) => String(form.get(`result${at}`) ?? "")),
    );
    focusText();
  };
  const list = calls.map((call, at) => (
    <div class="call" key={at}>
      <p>
        <Icon name="tool" /> Calls <code>{call.name}</code>
      </p>
      <CodeBlock code={pretty(call.arguments)} language="json" />
      {canAnswer && (
        <label>
          Result of {call.name}
          <textarea name={`result${at}`} rows={2} />
        </label>
      )}
    </div>
  ));
  if (!canAnswer) return <div class="calls">{list}</div>;
  return (
    <form class="calls" onSubmit={done}>
      {list}
      <div class="buttons">
        <button class="primary">Give {calls.length === 1 ? "the result" : "the results"}</button>
      </div>
    </form>
  );
}
