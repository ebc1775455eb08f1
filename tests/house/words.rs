// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Words that this project does not use in comments, messages and documents: they hide who does
//! what, or have a term in this field.

use super::{files, text};

/// Words and their replacements.
const REPLACED: &[(&str, &str)] = &[
    ("tell", "report, show, print"),
    ("tells", "reports, shows, prints"),
    ("told", "reported, shown"),
    ("whoever", "the caller, the thread, …"),
    ("somebody", "another vCPU, another process, …"),
    ("nobody", "no vCPU, no process, …"),
    ("ours", "`granule bench`"),
    ("theirs", "`kvm_page_table_test`"),
    ("in vain", "spurious, without effect"),
    ("made ready", "cleaned to PoC"),
    ("put back", "restore, recover"),
    ("puts back", "restores, recovers"),
    ("is to be had", "is available"),
    ("had anew", "allocated again"),
];

/// Words that do not open a doc comment: a noun or a third-person verb says what the item is.
const NO_OPENING: &[&str] = &[
    "All", "How", "Its", "Many", "None", "Nothing", "That", "There", "What", "Where", "Whether",
    "Which", "Who", "Whoever", "Whom", "Why",
];

/// Returns the first word of a doc comment's line.
fn doc_word(line: &str) -> Option<&str> {
    let text = line.trim_start();
    let text = text.strip_prefix("/// ").or_else(|| text.strip_prefix("//! "))?;
    text.split(|c: char| !c.is_alphanumeric()).next()
}

/// Returns the parts of a line that are prose: all of a page, comments and strings of a source.
fn prose(path: &str, line: &str) -> String {
    if path.ends_with(".md") {
        return line.to_owned();
    }
    let comment = line.find("//").map_or("", |at| &line[at..]);
    let strings = line.split('"').skip(1).step_by(2).collect::<Vec<_>>();
    format!("{comment} {}", strings.join(" "))
}

/// Returns whether a phrase occurs in a text as whole words.
fn has(text: &str, phrase: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(phrase).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + phrase.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

#[test]
fn a_phrase_is_found_as_whole_words() {
    assert!(has("nothing is put back here", "put back"));
    assert!(!has("hours", "ours"));
}

#[test]
fn comments_messages_and_pages_use_the_terms_of_the_field() {
    let mut found = Vec::new();
    for path in files(&[".rs", ".md"]) {
        let name = path.display().to_string();
        if name == "tests/house/words.rs" {
            continue;
        }
        for (number, line) in text(&path).lines().enumerate() {
            let prose = prose(&name, line).to_lowercase();
            for (word, instead) in REPLACED.iter().filter(|(word, _)| has(&prose, word)) {
                found.push(format!("{name}:{}: '{word}': write {instead}", number + 1));
            }
        }
    }

    assert!(found.is_empty(), "{} places:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_doc_comment_opens_with_a_noun_or_a_verb() {
    let mut found = Vec::new();
    for path in files(&[".rs"]) {
        let text = text(&path);
        let mut before = None;
        for (number, line) in text.lines().enumerate() {
            let word = doc_word(line);
            if let (None, Some(word)) = (before, word)
                && NO_OPENING.contains(&word)
            {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
            let doc = line.trim_start();
            before = (doc.starts_with("///") || doc.starts_with("//!")).then_some(());
        }
    }

    assert!(found.is_empty(), "{} places:\n{}", found.len(), found.join("\n"));
}
