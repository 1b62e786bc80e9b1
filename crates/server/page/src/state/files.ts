// Text files that go with a question.

import type { TextFile } from "./conversation.ts";

/** More than any context holds. */
const MOST_BYTES = 4 * 1024 * 1024;

/** Reads a text file; throws a sentence if it is none. */
export async function readText(file: File): Promise<TextFile> {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than 4 MB. Attach a shorter part of it.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new TypeError("binary");
    return { name: file.name, text };
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8. Only text can be attached.`);
  }
}
