// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Patch series as mail: an mbox file (`b4 am`), or a directory of `git format-patch`.
//!
//! `git mailsplit` and `git mailinfo` decode the mails into a temporary directory. A mail without a
//! diff, such as a cover letter, is no patch. The line `base-commit: HASH` in any mail names the
//! commit to which the first patch applies.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use crate::{
    command::CommandError,
    error::LabError,
    kernel::git::git,
    shell::{self, absolute},
};

/// Suffixes of files with mails in a directory: `git format-patch`, `b4 am` and others.
const SUFFIXES: [&str; 4] = [".patch", ".eml", ".mbx", ".mbox"];

#[derive(Debug)]
pub struct MailedSeries {
    /// Name of the file or directory, without its suffix.
    pub name: String,
    pub base_commit: Option<String>,
    pub patches: Vec<MailedPatch>,
    /// Directory of the decoded patches.
    _decoded: TempDir,
}

#[derive(Debug)]
pub struct MailedPatch {
    pub subject: String,
    pub path: PathBuf,
}

impl MailedSeries {
    pub fn read(path: &Path) -> Result<Self, LabError> {
        let path = absolute(path)?;
        let failed = |source| CommandError::file("read the patches", &path, source);
        let decoded = tempfile::tempdir().map_err(failed)?;
        let is_directory = fs::metadata(&path).map_err(failed)?.is_dir();
        let mut mails = Vec::new();
        for (index, file) in files(&path, is_directory).into_iter().enumerate() {
            let is_mail = file.extension().is_some_and(|e| e == "patch" || e == "eml");
            match is_directory && is_mail {
                true => mails.push(file),
                false => mails.extend(split(&file, &decoded.path().join(index.to_string()))?),
            }
        }
        let mut patches = Vec::new();
        let mut base_commit = None;
        for (index, mail) in mails.iter().enumerate() {
            let text = shell::read(mail)?;
            let text = String::from_utf8_lossy(&text);
            let mut lines = text.lines();
            let base = lines.find_map(|line| line.strip_prefix("base-commit: "));
            base_commit = base_commit.or(base.map(|hash| hash.trim().to_owned()));
            let diff = decoded.path().join(format!("{:04}.patch", index + 1));
            let (place, subject) = decode(mail, &diff)?;
            if has_diff(&shell::read(&diff)?) {
                patches.push((place, MailedPatch { subject, path: diff }));
            }
        }
        if patches.is_empty() {
            let none = io::Error::new(
                io::ErrorKind::InvalidData,
                "it has no patch: set --patches to an mbox file, or to a directory of *.patch, \
                 *.eml, *.mbx or *.mbox files",
            );
            return Err(failed(none).into());
        }
        let patches = in_order(patches).map_err(|reason| {
            LabError::Unusable(format!("--patches {}: {reason}", path.display()))
        })?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, base_commit, patches, _decoded: decoded })
    }
}

/// Reports whether a mail has a diff, which begins a line: the text of a cover letter may name one.
fn has_diff(text: &[u8]) -> bool {
    text.split(|byte| *byte == b'\n')
        .any(|line| line.starts_with(b"diff ") || line.starts_with(b"@@ -"))
}

/// Place of a patch in its series: `n/m` of the subject.
type Place = (usize, usize);

/// Returns the patches in the order of their series, or in the order of the mails if they have no
/// numbers. Refuses a series with missing patches.
fn in_order(mut patches: Vec<(Option<Place>, MailedPatch)>) -> Result<Vec<MailedPatch>, String> {
    let without_place =
        |patches: Vec<(_, MailedPatch)>| patches.into_iter().map(|(_, patch)| patch).collect();
    let Some((_, count)) = patches.iter().find_map(|(place, _)| *place) else {
        return Ok(without_place(patches));
    };
    patches.sort_by_key(|(place, _)| *place);
    let is_other = |(place, _): &&(Option<Place>, _)| place.is_none_or(|(_, of)| of != count);
    if let Some((_, patch)) = patches.iter().find(is_other) {
        return Err(format!(
            "the patch '{}' has no number n/{count}, so its place in the series is unknown: pass \
             one version of one series",
            patch.subject
        ));
    }
    let numbers: Vec<usize> =
        patches.iter().filter_map(|(place, _)| Some(place.as_ref()?.0)).collect();
    let missing: Vec<String> = (1..=count)
        .filter(|number| !numbers.contains(number))
        .map(|number| format!("{number}/{count}"))
        .collect();
    if !missing.is_empty() {
        return Err(format!("patch {} is missing: fetch the whole series", missing.join(", ")));
    }
    if let Some(pair) = numbers.array_windows().find(|[one, other]| one == other) {
        return Err(format!(
            "patch {}/{count} occurs twice: pass one version of the series",
            pair[0]
        ));
    }
    Ok(without_place(patches))
}

/// Returns the files with mails: one, or those of a directory, by name.
fn files(path: &Path, is_directory: bool) -> Vec<PathBuf> {
    if !is_directory {
        return vec![path.to_owned()];
    }
    let has_mail = |name: &String| SUFFIXES.iter().any(|suffix| name.ends_with(suffix));
    let names = shell::sorted_entries(path).into_iter().filter(has_mail);
    names.map(|name| path.join(name)).collect()
}

/// Splits an mbox file into one file for each mail, and returns their paths in order.
fn split(mbox: &Path, into: &Path) -> Result<Vec<PathBuf>, CommandError> {
    let task = format!("splitting {}", mbox.display());
    fs::create_dir(into).map_err(|e| CommandError::file("create", into, e))?;
    git(task)
        .args(["mailsplit", "--keep-cr", "-b"])
        .arg(option("-o", into))
        .arg("--")
        .arg(mbox)
        .query()?;
    Ok(shell::sorted_entries(into).into_iter().map(|name| into.join(name)).collect())
}

fn option(name: &str, path: &Path) -> String {
    format!("{name}{}", path.display())
}

/// Writes the diff of a mail to a file, and returns the place and the subject of `[PATCH n/m]
/// SUBJECT`.
fn decode(mail: &Path, diff: &Path) -> Result<(Option<Place>, String), CommandError> {
    let info = git(format!("decoding {}", mail.display()))
        .args(["mailinfo", "-k", "--no-scissors", "--encoding=UTF-8", "/dev/null"])
        .arg(diff)
        .input(mail)
        .query()?;
    let subject = info.lines().find_map(|line| line.strip_prefix("Subject: "));
    Ok(parse_subject(subject.unwrap_or("(no subject)")))
}

/// Splits `[PATCH n/m] SUBJECT`; other tags in brackets and replies (`Re:`) are removed too.
fn parse_subject(text: &str) -> (Option<Place>, String) {
    let mut place = None;
    let mut rest = text.trim();
    loop {
        if let Some((tags, after)) = rest.strip_prefix('[').and_then(|tail| tail.split_once(']')) {
            let number = |word: &str| {
                let (n, m) = word.split_once('/')?;
                Some((n.parse().ok()?, m.parse().ok()?))
            };
            place = place.or_else(|| tags.split_ascii_whitespace().find_map(number));
            rest = after.trim_start();
        } else if let Some(after) = rest.strip_prefix("Re:") {
            rest = after.trim_start();
        } else {
            return (place, rest.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COVER: &str = "From 0 Mon Sep 17 00:00:00 2001\nFrom: A <a@example>\n\
                         Subject: [PATCH 0/2] Cover\n\nText\n---\nRange-diff against v1\n\n\
                         base-commit: 0123abcd\n\n";

    fn mail(number: u32) -> String {
        format!(
            "From 0 Mon Sep 17 00:00:00 2001\nFrom: A <a@example>\n\
             Subject: [PATCH {number}/2] Change {number}\n\nReason\n---\n f | 2 +-\n\n\
             diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-{}\n+{number}\n--\n2.39\n\n",
            number - 1
        )
    }

    #[test]
    fn an_mbox_and_a_directory_have_the_same_patches() {
        let directory = tempfile::tempdir().unwrap();
        let mbox = directory.path().join("topic.mbx");
        fs::write(&mbox, [COVER, &mail(1), &mail(2)].concat()).unwrap();
        let folder = directory.path().join("topic");
        fs::create_dir(&folder).unwrap();
        for (name, text) in
            [("0000-c.patch", COVER), ("0001-a.patch", &mail(1)), ("0002-b.patch", &mail(2))]
        {
            fs::write(folder.join(name), text).unwrap();
        }

        for path in [mbox, folder] {
            let series = MailedSeries::read(&path).unwrap();

            let subjects: Vec<_> = series.patches.iter().map(|p| p.subject.as_str()).collect();
            assert_eq!(subjects, ["Change 1", "Change 2"]);
            assert_eq!(series.name, "topic");
            assert_eq!(series.base_commit.as_deref(), Some("0123abcd"));
            let diff = fs::read_to_string(&series.patches[1].path).unwrap();
            assert!(diff.contains("-1\n+2"), "{diff}");
        }
    }

    #[test]
    fn a_directory_of_mailboxes_is_read_in_the_order_of_the_series() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("1.mbox"), mail(2)).unwrap();
        fs::write(directory.path().join("2.mbx"), [COVER, &mail(1)].concat()).unwrap();

        let series = MailedSeries::read(directory.path()).unwrap();

        let subjects: Vec<_> = series.patches.iter().map(|p| p.subject.as_str()).collect();
        assert_eq!(subjects, ["Change 1", "Change 2"]);
    }

    #[test]
    fn a_series_that_is_not_whole_is_refused_by_number() {
        let directory = tempfile::tempdir().unwrap();
        let mbox = directory.path().join("topic.mbx");
        let of_seven = |number: u32| mail(number).replace("/2]", "/7]");
        for (mails, reason) in [
            (vec![of_seven(2), of_seven(1)], "patch 3/7, 4/7, 5/7, 6/7, 7/7 is missing"),
            (vec![mail(1), mail(2), mail(2)], "patch 2/2 occurs twice"),
            (vec![mail(1), of_seven(2)], "'Change 2' has no number n/2"),
        ] {
            fs::write(&mbox, mails.concat()).unwrap();

            let error = MailedSeries::read(&mbox).unwrap_err().to_string();

            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_place_of_a_patch_is_in_the_brackets_of_its_subject() {
        for (text, place, subject) in [
            ("[PATCH v2 03/12] KVM: arm64: X", Some((3, 12)), "KVM: arm64: X"),
            ("[RFC][PATCH 1/2] X [y]", Some((1, 2)), "X [y]"),
            ("[PATCH] X", None, "X"),
            ("Re: [PATCH 1/1] X", Some((1, 1)), "X"),
            ("X 1/2", None, "X 1/2"),
        ] {
            assert_eq!(parse_subject(text), (place, subject.to_owned()));
        }
    }

    #[test]
    fn a_file_without_patches_is_refused_with_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let mbox = directory.path().join("cover.mbx");
        fs::write(&mbox, COVER).unwrap();

        let error = MailedSeries::read(&mbox).unwrap_err();
        let missing = MailedSeries::read(&directory.path().join("none")).unwrap_err();

        let cause = std::error::Error::source(&error).map(ToString::to_string);
        assert!(format!("{error} {cause:?}").contains("--patches"), "{error}");
        assert!(missing.to_string().contains("none"), "{missing}");
    }
}
