// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lines, values and errors that the logs of all kernel tests share, and the removal of a
//! terminal's escape sequences (ECMA-48: colours, cursor, title).

use granule_types::units::Nanoseconds;

use crate::results::FileError;

/// Words that begin a run of any of the kernel's KVM tests.
pub const MODE: &str = "Testing guest mode: ";
pub const FAILURE: &str = "==== Test Assertion Failure ====";

pub fn failed() -> FileError {
    FileError::new("the test failed: see its message in the log")
}

/// Returns the error of a line that belongs to no run.
pub fn line_outside_run(text: &str) -> FileError {
    let (text, mode) = (text.trim(), MODE.trim_end());
    FileError::new(format!("'{text}' belongs to no run: the line '{mode}' before it is missing"))
}

/// Returns the error of a value that does not have the form its line requires.
pub fn damaged(value: &str, expected: &str) -> FileError {
    FileError::new(format!("'{value}' is not {expected}: the line is damaged"))
}

/// Returns the error of a line that the run from line `begin` has already.
pub fn repeated(words: &str, begin: usize) -> FileError {
    FileError::new(format!(
        "'{}' is repeated in the run that begins at line {begin}: lines are missing",
        words.trim()
    ))
}

/// Returns the error of a line of another test than its run, which begins at line `begin`.
pub fn line_of_other_test(begin: usize) -> FileError {
    FileError::new(format!(
        "the line is of another test than the run that begins at line {begin}: two logs are mixed"
    ))
}

/// Returns the error of iteration `found` after iteration `last`, which is 0 for none.
pub fn out_of_order(found: u32, last: u32) -> FileError {
    let message =
        format!("iteration {found} follows {last}: lines are missing; run the test again");
    FileError::new(message)
}

/// Returns the error of a line within which the file ends.
pub fn cut_off(text: &str) -> FileError {
    let text = text.trim();
    FileError::new(format!("'{text}' is cut off: run the test again, or delete the line"))
}

pub fn json() -> FileError {
    FileError::new(
        "the line is JSON in a log: use separate files for logs and results of `granule bench \
         --json`",
    )
}

/// Returns the error of a run that lacks the line with these words.
pub fn incomplete(missing: &str) -> FileError {
    FileError::new(format!(
        "the run that begins here has no '{}': it is cut off; run the test again, or delete the \
         run",
        missing.trim()
    ))
}

/// Returns the text after `words` in a line that contains them.
pub fn text_after<'a>(text: &'a str, words: &str) -> Option<&'a str> {
    text.split_once(words).map(|(_, value)| value.trim())
}

/// Reads a value.
pub fn parsed<T: std::str::FromStr>(value: &str, expected: &str) -> Result<T, FileError> {
    value.parse().map_err(|_| damaged(value, expected))
}

/// Reads seconds with exactly nine decimals, as the kernel's tests print them.
pub fn seconds(text: &str) -> Option<Nanoseconds> {
    let (whole, part) = text.strip_suffix('s')?.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() != 9 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let part: u64 = part.parse().ok()?;
    Some(Nanoseconds(whole.checked_mul(1_000_000_000)?.checked_add(part)?))
}

/// Reads a time.
pub fn time(value: &str) -> Result<Nanoseconds, FileError> {
    seconds(value.trim()).ok_or_else(|| damaged(value.trim(), "a time as S.NNNNNNNNNs"))
}

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
