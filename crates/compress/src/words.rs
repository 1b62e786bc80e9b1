//! How strongly each segment repeats the words of the query.
//!
//! Attention of a small scorer misses a name that its tokenizer cuts into pieces, and one of
//! several facts that a question asks for at once. Words find both: a segment weighs as in BM25, by
//! the rarity of the query's words that it holds. Segments that share rare words with the best ones
//! follow, for facts in two hops: the first segment names what the second one is about.
//!
//! Only rare words make a segment count. The query's last line and its question count most: before
//! them may stand the end of the text that is asked about.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::segment::{self, SegmentLimits};

/// A segment that weighs less than this share of the heaviest is none.
const LEAST_SHARE: f32 = 0.25;
/// A segment of at least this share of the heaviest leads to others, and its neighbours are near.
const STRONG_SHARE: f32 = 0.8;
/// A word that occurs in more segments than this, and in more than one of `LINKED_ONE_IN`, leads
/// nowhere.
const MOST_LINKED: usize = 8;
const LINKED_ONE_IN: usize = 32;
/// The weight of two words side by side against that of a word.
const PAIR_SHARE: f32 = 0.5;
/// The weight of a hop's words against that of the query's, and its share of the heaviest at most.
const HOP_SHARE: f32 = 0.5;
const HOP_MOST: f32 = 0.75;
/// Words that ask and connect. They name nothing, but a text of statements may hold few of them.
const UNNAMING: &[&str] = &[
    "a", "about", "all", "an", "and", "answer", "any", "are", "as", "at", "be", "by", "can",
    "could", "did", "do", "does", "each", "every", "find", "for", "from", "give", "had", "has",
    "have", "how", "i", "if", "in", "is", "it", "its", "list", "look", "me", "my", "not", "of",
    "on", "only", "or", "please", "question", "say", "tell", "text", "than", "that", "the",
    "their", "them", "there", "these", "they", "this", "those", "to", "was", "we", "were", "what",
    "when", "where", "which", "who", "whom", "whose", "why", "will", "with", "would", "you",
    "your",
];
/// Shares of words in the sentences beside the question, and in all others of the query.
const NEXT_SENTENCE: f32 = 0.8;
const FAR_SENTENCE: f32 = 0.25;
/// The least share of a word that makes a match by itself.
const LEADING_SHARE: f32 = 0.5;
/// A sentence with fewer words is none, such as `Answer:`.
const SENTENCE_WORDS: usize = 3;
/// BM25's saturation and its share of length normalisation.
const SATURATION: f32 = 1.2;
const LENGTH_SHARE: f32 = 0.4;

/// What the words say of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WordMatch {
    /// 0 for a segment that has nothing in common with the query.
    pub weight: f32,
    /// Whether it is among the heaviest.
    pub is_strong: bool,
}

/// Matches each of `segments` with the words of `query`. A word in more than `most_hits` segments
/// is not rare.
pub fn find(segments: &[&str], query: &str, most_hits: usize) -> Vec<WordMatch> {
    let words: Vec<HashSet<Term>> = segments.iter().map(|text| terms(text)).collect();
    let mut holders: HashMap<Term, Vec<usize>> = HashMap::new();
    for (segment, words) in words.iter().enumerate() {
        for word in words {
            holders.entry(*word).or_default().push(segment);
        }
    }
    let count = segments.len().max(1) as f32;
    let mean = words.iter().map(HashSet::len).sum::<usize>() as f32 / count;
    let length = |segment: usize| {
        let relative = words[segment].len() as f32 / mean.max(1.0);
        let norm = 1.0 - LENGTH_SHARE + LENGTH_SHARE * relative;
        (SATURATION + 1.0) / (1.0 + SATURATION * norm)
    };
    let rarity = |held: &[usize]| (count / held.len() as f32).ln();
    let asked = asked(query);
    let mut weights = vec![0.0_f32; segments.len()];
    let mut has_rare = vec![false; segments.len()];
    for (word, share) in &asked {
        let held = holders.get(word).map_or(&[][..], Vec::as_slice);
        let pair = if word.is_pair { PAIR_SHARE } else { 1.0 };
        for segment in held {
            weights[*segment] += pair * share * rarity(held) * length(*segment);
            has_rare[*segment] |= held.len() <= most_hits && *share >= LEADING_SHARE;
        }
    }
    let counted = (0..segments.len()).filter(|segment| has_rare[*segment]);
    let most = counted.map(|segment| weights[segment]).fold(0.0, f32::max);
    let mut found: Vec<WordMatch> = (0..segments.len())
        .map(|segment| {
            let weight = weights[segment];
            let counts = has_rare[segment] && weight > 0.0 && weight >= LEAST_SHARE * most;
            WordMatch {
                weight: if counts { weight } else { 0.0 },
                is_strong: counts && weight >= STRONG_SHARE * most,
            }
        })
        .collect();
    let most_linked = MOST_LINKED.max(segments.len() / LINKED_ONE_IN);
    let mut hops = vec![0.0_f32; segments.len()];
    for source in (0..segments.len()).filter(|segment| found[*segment].is_strong) {
        let is_new = |word: &&Term| !word.is_pair && asked.iter().all(|(known, _)| known != *word);
        let new = words[source].iter().filter(is_new);
        let mut held: Vec<&Vec<usize>> = new.map(|word| &holders[word]).collect();
        held.retain(|held| (2..=most_linked).contains(&held.len()));
        held.sort();
        let mut of_source: BTreeMap<usize, f32> = BTreeMap::new();
        for held in held {
            for segment in held.iter().filter(|segment| **segment != source) {
                *of_source.entry(*segment).or_default() +=
                    HOP_SHARE * rarity(held) * length(*segment);
            }
        }
        for (segment, hop) in of_source {
            hops[segment] = hops[segment].max(hop);
        }
    }
    for (segment, hop) in hops.into_iter().enumerate().filter(|(_, hop)| *hop > 0.0) {
        // Its own words of the query count too, even frequent ones.
        let sum = hop + weights[segment];
        let weight = HOP_MOST * most * (1.0 - (-sum / most).exp());
        found[segment].weight = found[segment].weight.max(weight);
    }
    found
}

/// The words of a query with their shares, in a fixed order, so that sums have the same bits in
/// every run.
///
/// The question of a line is its last sentence with a question mark, else its last sentence.
fn asked(query: &str) -> Vec<(Term, f32)> {
    let unnaming: HashSet<u64> = UNNAMING.iter().flat_map(|word| words(word)).collect();
    let mut shares: Vec<(Term, f32)> = Vec::new();
    let mut is_last_line = true;
    for line in query.lines().rev() {
        let sentences = segment::split(line, SegmentLimits::default());
        let sentences = sentences.into_iter().map(|bytes| &line[bytes]);
        let sentences: Vec<(&str, Vec<u64>)> = sentences
            .map(|sentence| (sentence, words(sentence).collect()))
            .filter(|(_, words): &(_, Vec<u64>)| !words.is_empty())
            .collect();
        let question = sentences.iter().rposition(|(text, _)| text.contains('?'));
        let question = question.unwrap_or(sentences.len().saturating_sub(1));
        for (at, (_, words)) in sentences.iter().enumerate() {
            let share = match at.abs_diff(question) {
                0 if is_last_line => 1.0,
                1 if is_last_line => NEXT_SENTENCE,
                _ => FAR_SENTENCE,
            };
            let names = |word: &u64| !unnaming.contains(word);
            let single = words
                .iter()
                .filter(|word| names(word))
                .map(|word| Term::of(*word));
            let pairs = words.windows(2).filter(|two| two.iter().all(names));
            for term in single.chain(pairs.map(Term::of_pair)) {
                match shares.iter_mut().find(|(other, _)| *other == term) {
                    Some((_, known)) => *known = known.max(share),
                    None => shares.push((term, share)),
                }
            }
        }
        is_last_line &= sentences
            .iter()
            .all(|(_, words)| words.len() < SENTENCE_WORDS);
    }
    shares
}

/// A word, or two words side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Term {
    hash: u64,
    is_pair: bool,
}

impl Term {
    fn of(word: u64) -> Term {
        Term {
            hash: word,
            is_pair: false,
        }
    }

    fn of_pair(two: &[u64]) -> Term {
        let hash = two
            .iter()
            .fold(0, |hash: u64, word| hash.rotate_left(1) ^ word);
        Term {
            hash,
            is_pair: true,
        }
    }
}

/// The terms of a segment.
fn terms(text: &str) -> HashSet<Term> {
    let words: Vec<u64> = words(text).collect();
    let single = words.iter().map(|word| Term::of(*word));
    single.chain(words.windows(2).map(Term::of_pair)).collect()
}

/// Hashes of the stems of a text's words. Letters, digits and underscores make a word; single
/// letters are none.
fn words(text: &str) -> impl Iterator<Item = u64> {
    let is_inside = |c: char| c.is_alphanumeric() || c == '_';
    let pieces = text.split(move |c| !is_inside(c));
    pieces.filter_map(|piece| {
        let mut rest = piece.chars();
        let is_letter = rest.next()?.is_alphabetic() && rest.next().is_none();
        let lower = piece.to_lowercase();
        let mut hasher = DefaultHasher::new();
        stem(&lower).hash(&mut hasher);
        (!is_letter).then(|| hasher.finish())
    })
}

/// A word without the endings that English adds to it, so that `moved` is found for `move`.
fn stem(word: &str) -> &str {
    let mut stem = word;
    for (ending, least) in [("s", 3), ("ing", 4), ("ed", 3), ("e", 3)] {
        stem = match stem.strip_suffix(ending) {
            Some(rest) if rest.len() >= least => rest,
            _ => stem,
        };
    }
    stem
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sentences of filler with statements at places.
    fn text(n: usize, planted: &[(usize, &str)]) -> Vec<String> {
        let mut all: Vec<String> = (0..n)
            .map(|i| {
                format!(
                    "The {} weather was what the people of town {i} know.",
                    i % 7
                )
            })
            .collect();
        for (at, statement) in planted {
            all[*at] = (*statement).to_owned();
        }
        all
    }

    /// Places of the segments that count, the heaviest first.
    fn heaviest(n: usize, planted: &[(usize, &str)], query: &str) -> Vec<usize> {
        let all = text(n, planted);
        let segments: Vec<&str> = all.iter().map(String::as_str).collect();
        let found = find(&segments, query, 8);
        let mut order: Vec<usize> = (0..n).filter(|at| found[*at].weight > 0.0).collect();
        order.sort_by(|a, b| found[*b].weight.total_cmp(&found[*a].weight).then(a.cmp(b)));
        order
    }

    #[test]
    fn names_and_all_of_several_facts_are_found_in_other_words() {
        let planted = [
            (7, "Another folder of lopror is shop/scene.html."),
            (9, "The folder of Nora is lost."),
            (20, "A folder that Lopror has: quiz/budget.md"),
            (33, "folder [lopror] = movie.js"),
        ];
        let query = "What are all the special folders for lopror in the text?";
        let order = heaviest(60, &planted, query);
        let mut first = order[..3].to_vec();
        first.sort();
        assert_eq!(first, [7, 20, 33]);
    }

    #[test]
    fn two_hops_lead_to_the_second_fact() {
        let planted = [
            (5, "The manager of team Doushia is Uma Heepoal."),
            (12, "The manager of team Brown is Carl Heep."),
            (40, "Uma Heepoal lives in Ottawa."),
            (41, "Carl Heep lives in Jakarta."),
        ];
        let query = "In which city does the manager of team Doushia live?";
        let order = heaviest(60, &planted, query);
        assert_eq!(order[0], 5);
        assert!(order[1..3].contains(&40), "{order:?}");
    }

    #[test]
    fn text_before_the_question_hardly_counts() {
        let planted = [
            (7, "Weak to my video pink Jouzoun always."),
            (9, "The price of the portfolio went up."),
            (20, "The light in the portfolio case went out."),
        ];
        let question = "Copy the sentence with pink Jouzoun.";
        let before = "The price of the portfolio went up, and the light in the case went out.";
        for query in [
            format!("{before}\n\n{question}"),
            format!("{before}\n\nQuestion: {question}\nAnswer:"),
            format!("{before} {before} {question} Look it up."),
        ] {
            assert_eq!(heaviest(60, &planted, &query)[0], 7, "{query}");
        }
    }

    #[test]
    fn frequent_words_make_no_match_and_nothing_matches_an_empty_query() {
        assert_eq!(
            heaviest(60, &[], "What was the weather of the town?"),
            [0; 0]
        );
        assert_eq!(heaviest(60, &[], ""), [0; 0]);
        assert_eq!(find(&[], "a name", 8), []);
    }

    #[test]
    fn words_ignore_case_and_endings_but_keep_identifiers_and_numbers_whole() {
        let same = |a: &str, b: &str| words(a).eq(words(b));
        assert!(same("Folders,", "folder") && same("moved", "moves") && same("test", "tested"));
        assert!(same("MAX_RETRY = 7", "max_retry 7"));
        assert!(!same("max_retry", "max retry"));
        assert_eq!(words("a, b; c").count(), 0);
    }
}
