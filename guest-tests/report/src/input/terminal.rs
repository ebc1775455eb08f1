// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs without what a terminal takes for commands (ECMA-48): colours, cursor, title, returns.
//!
//! ```text
//! ESC [ 1;31 m       a control sequence, up to its last letter
//! ESC ] 0;title BEL  a string for the terminal itself, up to BEL or ESC \
//! ESC ( B            anything else, up to its last letter
//! ```
//!
//! What is broken ends with its line: no line is lost, so lines count as they did.

use std::{iter::Peekable, str::Chars};

const ESCAPE: char = '\u{1b}';
const BELL: char = '\u{7}';

/// A text as a reader of the terminal would have it, but for what the cursor did.
pub fn plain_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            ESCAPE => escaped(&mut chars),
            // The same in one character.
            '\u{9b}' => sequence(&mut chars),
            '\u{90}' | '\u{98}' | '\u{9d}'..='\u{9f}' => string(&mut chars),
            '\n' | '\t' => out.push(c),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

/// What follows an escape.
fn escaped(chars: &mut Peekable<Chars>) {
    match chars.peek() {
        Some('[') => {
            chars.next();
            sequence(chars);
        }
        Some(']' | 'P' | 'X' | '^' | '_') => {
            chars.next();
            string(chars);
        }
        _ => {
            while chars.next_if(|c| (' '..='/').contains(c)).is_some() {}
            chars.next_if(|c| ('0'..='~').contains(c));
        }
    }
}

/// Parameters, then a letter.
fn sequence(chars: &mut Peekable<Chars>) {
    while chars.next_if(|c| (' '..='?').contains(c)).is_some() {}
    chars.next_if(|c| ('@'..='~').contains(c));
}

/// Anything up to the string's end.
fn string(chars: &mut Peekable<Chars>) {
    while let Some(c) = chars.next_if(|c| *c != '\n') {
        let ends = match c {
            BELL | '\u{9c}' => true,
            ESCAPE => chars.next_if_eq(&'\\').is_some(),
            _ => false,
        };
        if ends {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_every_kind_are_left_out() {
        for (noisy, plain) in [
            ("\u{1b}[1;31mred\u{1b}[0m", "red"),
            ("\u{1b}[?25lhidden\u{1b}[?25h\r\n", "hidden\n"),
            ("bold\u{1b}(B\u{1b}[m", "bold"),
            (
                "\u{1b}#8\u{1b}=\u{1b}>\u{1b}7\u{1b}8\u{1b}Mtext\u{1b}c",
                "text",
            ),
            ("\u{1b}]0;Testing guest mode: x\u{7}text", "text"),
            ("\u{1b}]8;;file\u{1b}\\text\u{1b}]8;;\u{1b}\\", "text"),
            ("\u{1b}P1$r0m\u{1b}\\text", "text"),
            ("\u{9b}31mtext\u{9d}0;title\u{9c}", "text"),
            ("a\tb\u{8}\u{0}", "a\tb"),
        ] {
            assert_eq!(plain_text(noisy), plain, "{noisy:?}");
        }
    }

    #[test]
    fn what_is_broken_ends_with_its_line() {
        for noise in [
            "\u{1b}",
            "\u{1b}[",
            "\u{1b}[12;",
            "\u{1b}]0;title",
            "\u{1b}(",
            "\u{1b}]\u{1b}",
        ] {
            assert_eq!(
                plain_text(&format!("{noise}\ntext\n")),
                "\ntext\n",
                "{noise:?}"
            );
        }
    }

    #[test]
    fn what_belongs_to_no_command_stays() {
        // A sequence that is broken by a character of another alphabet does not take it along.
        assert_eq!(plain_text("\u{1b}[3\u{fffd}1m"), "\u{fffd}1m");
        assert_eq!(plain_text("vCPUs: 16 \u{b5}s"), "vCPUs: 16 \u{b5}s");
    }
}
