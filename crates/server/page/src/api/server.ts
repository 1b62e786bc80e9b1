// Requests to the server that the page came from. Paths are relative, for proxies that have a path of their own.

import { signal } from "@preact/signals";
import { faultFrom, faultOfResponse, isAbort } from "./fault.ts";
import { read, write } from "../state/local.ts";

const NAME = "key";

/** The key of `#key=` in the address, which is then taken out of sight, or the one that was typed before. */
function knownKey(): string {
  const hash = new URLSearchParams(location.hash.slice(1));
  const linked = hash.get("key");
  if (linked) {
    write(NAME, linked, "session");
    hash.delete("key");
    history.replaceState(null, "", `${location.pathname}${location.search}${hash.size ? `#${hash}` : ""}`);
  }
  return linked ?? read(NAME, "session") ?? read("hearth.key") ?? "";
}

export const apiKey = signal(knownKey());

/** Whether the server has refused the last request for want of a key. */
export const needsKey = signal(false);

/** Takes a key for this tab, or for this browser if it is to be remembered. */
export function setKey(key: string, remember: boolean): void {
  apiKey.value = key;
  write(NAME, key || null, "session");
  write("hearth.key", remember && key ? key : null);
}

export function isRemembered(): boolean {
  return read("hearth.key") !== null;
}

/** Sends a request; everything but a success is thrown as a `Fault`, an abort as it is. */
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers: Record<string, string> = {};
  if (init.body !== undefined) headers["content-type"] = "application/json";
  if (apiKey.value) headers["authorization"] = `Bearer ${apiKey.value}`;
  try {
    const response = await fetch(path, { ...init, headers });
    needsKey.value = response.status === 401;
    if (!response.ok) throw await faultOfResponse(response);
    return response;
  } catch (thrown) {
    throw isAbort(thrown) ? thrown : faultFrom(thrown);
  }
}

export async function getJson<T>(path: string): Promise<T> {
  return (await request(path)).json() as Promise<T>;
}
