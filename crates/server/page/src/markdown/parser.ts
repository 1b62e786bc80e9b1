// Markdown to tokens. Nothing here makes HTML: tokens become elements one by one, so that text of a reply can never be
// read as markup. Raw HTML in a reply is text, and links lead to web and mail addresses only.

import { tex } from "@mdit/plugin-tex";
import MarkdownIt from "markdown-it";

export type Token = ReturnType<MarkdownIt["parse"]>[number];

/** What a parse remembers: the targets of `[name]: address` lines. */
export interface Environment {
  references?: Record<string, unknown>;
}

export function isSafeLink(address: string): boolean {
  return /^(https?:\/\/|mailto:)/i.test(address);
}

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = isSafeLink;
parser.use(tex, { delimiters: "all", render: () => "" });

export function parse(source: string, environment: Environment): Token[] {
  return parser.parse(source, environment);
}
