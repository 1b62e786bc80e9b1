// Keys, the way to the status page, and the licences of what the page is made with.

import { useSignal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect } from "preact/hooks";
import licences from "virtual:licences";
import { getJson } from "../api/server.ts";
import { SHORTCUTS } from "./shortcuts.ts";
import { Dialog } from "./Dialog.tsx";

export function HelpDialog(): VNode {
  const version = useSignal("");
  useEffect(() => {
    void getJson<{ version: string }>("version").then(
      (answer) => (version.value = answer.version),
      () => undefined,
    );
  }, []);
  return (
    <Dialog title="Help">
      <h3>Keys</h3>
      <dl class="keys">
        {SHORTCUTS.map(({ keys, does }) => (
          <div key={does}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{does}</dd>
          </div>
        ))}
      </dl>
      <h3>What the figures mean</h3>
      <dl class="words">
        <div>
          <dt>Guesses right</dt>
          <dd>To be faster, the server guesses some words ahead and checks them all at once. Wrong guesses cost time, never quality.</dd>
        </div>
        <div>
          <dt>Remembered</dt>
          <dd>The part of the conversation that the server still had in memory and did not read again.</dd>
        </div>
        <div>
          <dt>Context</dt>
          <dd>All that the model can read at once: the conversation, attached files and its own reply.</dd>
        </div>
      </dl>
      <p>
        {/* An opener of the same page hands its key to the new tab. */}
        <a href="status" target="_blank" rel="opener">
          Status of the server
        </a>{" "}
        (if it was started with <code>--status-page</code>){version.value && ` · Hearth ${version.value}`}
      </p>
      <details>
        <summary>Licences of the parts of this page</summary>
        <pre class="licences" tabIndex={0}>
          {licences}
        </pre>
      </details>
    </Dialog>
  );
}
