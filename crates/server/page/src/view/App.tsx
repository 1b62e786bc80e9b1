// The chat page: list, header, messages, message box, dialogs.

import { useSignal, useSignalEffect } from "@preact/signals";
import type { VNode } from "preact";
import { loadModels, model, models, modelsFault } from "../api/models.ts";
import { needsKey } from "../api/server.ts";
import { shown } from "../state/conversations.ts";
import { announcement } from "../state/runs.ts";
import { changedCount, set, settings } from "../state/settings.ts";
import { attach, Composer } from "./Composer.tsx";
import { HelpDialog } from "./HelpDialog.tsx";
import { Icon } from "./Icon.tsx";
import { KeyDialog } from "./KeyDialog.tsx";
import { dialog, isDrawerOpen } from "./layout.ts";
import { SettingsDialog } from "./SettingsDialog.tsx";
import { newChat, Sidebar } from "./Sidebar.tsx";
import { Thread } from "./Thread.tsx";

export function App(): VNode {
  const isOver = useSignal(false);
  useSignalEffect(() => {
    document.title = shown.value.title ? `${shown.value.title} · Hearth` : "Hearth";
  });
  const hasFiles = (event: DragEvent): boolean => event.dataTransfer?.types.includes("Files") ?? false;
  return (
    <div
      class={isOver.value ? "app over" : "app"}
      onDragOver={(event) => {
        if (!hasFiles(event)) return;
        event.preventDefault();
        isOver.value = true;
      }}
      onDragLeave={() => (isOver.value = false)}
      onDrop={(event) => {
        isOver.value = false;
        if (!hasFiles(event)) return;
        event.preventDefault();
        void attach([...(event.dataTransfer?.files ?? [])]);
      }}
    >
      <a class="skip" href="#text" onClick={skip}>
        To the message box
      </a>
      <Sidebar />
      {isDrawerOpen.value && <button type="button" class="shade" aria-label="Close the list" onClick={() => (isDrawerOpen.value = false)} />}
      <main>
        <Header />
        {needsKey.value && <KeyNotice />}
        <Thread />
        <Composer />
      </main>
      <p class="unseen" role="status" aria-live="polite">
        {announcement.value}
      </p>
      {dialog.value === "settings" && <SettingsDialog />}
      {dialog.value === "help" && <HelpDialog />}
      {dialog.value === "key" && <KeyDialog />}
    </div>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("text")?.focus();
}

function KeyNotice(): VNode {
  return (
    <div class="notice" role="alert">
      This server needs an API key.{" "}
      <button type="button" class="primary" onClick={() => (dialog.value = "key")}>
        Enter the key
      </button>
    </div>
  );
}

function Header(): VNode {
  const changed = changedCount(settings.value);
  return (
    <header class="bar">
      <button type="button" class="icon drawer-button" aria-label="Conversations" aria-expanded={isDrawerOpen.value} aria-controls="sidebar" onClick={() => (isDrawerOpen.value = !isDrawerOpen.value)}>
        <Icon name="menu" />
      </button>
      <h1>{shown.value.title || "New chat"}</h1>
      <ModelName />
      <button type="button" class="icon" aria-label={changed ? `Settings, ${changed} changed` : "Settings"} title="Settings" onClick={() => (dialog.value = "settings")}>
        <Icon name="gear" />
        {changed > 0 && <span class="badge">{changed}</span>}
      </button>
      <button type="button" class="icon drawer-button" aria-label="New chat" title="New chat" onClick={newChat}>
        <Icon name="plus" />
      </button>
    </header>
  );
}

/** The model, or a choice where the server has several. */
function ModelName(): VNode {
  const fault = modelsFault.value;
  if (fault && fault.kind !== "key") {
    return (
      <span class="model fault">
        {fault.message}{" "}
        <button type="button" class="plain" onClick={() => void loadModels()}>
          Try again
        </button>
      </span>
    );
  }
  if (models.value.length > 1) {
    return (
      <select class="model" aria-label="Model" value={model.value?.id ?? ""} onChange={(event) => set({ model: event.currentTarget.value })}>
        {models.value.map((one) => (
          <option key={one.id} value={one.id}>
            {one.state && one.state !== "loaded" ? `${one.id} (${one.state})` : one.id}
          </option>
        ))}
      </select>
    );
  }
  const known = model.value;
  return (
    <span class="model" id="model">
      {known ? known.id : ""}
      {known && known.context_length === undefined && " is loading"}
    </span>
  );
}
