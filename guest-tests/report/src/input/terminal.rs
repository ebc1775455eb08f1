// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs without the escape sequences of a terminal (ECMA-48): colours, cursor, title.

/// Removes escape sequences and control characters. A broken sequence ends with its line, so the
/// number of lines stays the same.
pub fn plain_text(text: &str) -> String {
    let separators = ['\n', '\t'];
    let pieces = text.split_inclusive(separators).map(|piece| {
        let words = piece.trim_end_matches(separators);
        strip_ansi_escapes::strip_str(ascii_escapes(words)) + &piece[words.len()..]
    });
    pieces.collect()
}

/// Replaces each control character above ASCII with its two-character form, and ends a control
/// sequence that another character above ASCII breaks, so that it does not consume further text.
fn ascii_escapes(text: &str) -> String {
    const CANCEL: char = '\u{18}';
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\u{80}'..='\u{9f}' => {
                out.push('\u{1b}');
                out.extend(char::from_u32(u32::from(c) - 0x40));
            }
            c if c.is_ascii() => out.push(c),
            c => {
                let is_parameter = |c: char| (' '..='?').contains(&c);
                if out.trim_end_matches(is_parameter).ends_with("\u{1b}[") {
                    out.push(CANCEL);
                }
                out.push(c);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_are_removed_and_text_stays() {
        for (noisy, plain) in [
            ("\u{1b}[1;31mred\u{1b}[0m", "red"),
            ("\u{1b}[?25lhidden\u{1b}[?25h\r\n", "hidden\n"),
            ("bold\u{1b}(B\u{1b}[m", "bold"),
            ("\u{1b}#8\u{1b}=\u{1b}>\u{1b}7\u{1b}8\u{1b}Mtext\u{1b}c", "text"),
            ("\u{1b}]0;Testing guest mode: x\u{7}text", "text"),
            ("\u{1b}]8;;file\u{1b}\\text\u{1b}]8;;\u{1b}\\", "text"),
            ("\u{1b}P1$r0m\u{1b}\\text", "text"),
            ("\u{9b}31mtext\u{9d}0;title\u{9c}", "text"),
            ("a\tb\u{8}\u{0}", "a\tb"),
            ("\u{1b}[3\u{fffd}1m", "\u{fffd}1m"),
            ("vCPUs: 16 \u{b5}s", "vCPUs: 16 \u{b5}s"),
        ] {
            assert_eq!(plain_text(noisy), plain, "{noisy:?}");
        }
    }

    #[test]
    fn a_broken_sequence_ends_with_its_line() {
        let title = "\u{1b}]0;title";
        for noise in ["\u{1b}", "\u{1b}[", "\u{1b}[12;", title, "\u{1b}(", "\u{1b}]\u{1b}"] {
            assert_eq!(plain_text(&format!("{noise}\ntext\n")), "\ntext\n", "{noise:?}");
        }
    }
}
