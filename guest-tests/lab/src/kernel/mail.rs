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
    LabError,
    command::CommandError,
    kernel::git::git,
    shell::{self, absolute},
};

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
        let mails = if is_directory {
            let is_patch = |name: &String| name.ends_with(".patch") || name.ends_with(".eml");
            let names = shell::sorted_entries(&path).into_iter().filter(is_patch);
            names.map(|name| path.join(name)).collect()
        } else {
            split(&path, &decoded.path().join("mails"))?
        };
        let mut patches = Vec::new();
        let mut base_commit = None;
        for (index, mail) in mails.iter().enumerate() {
            let text = shell::read(mail)?;
            let text = String::from_utf8_lossy(&text);
            let mut lines = text.lines();
            let base = lines.find_map(|line| line.strip_prefix("base-commit: "));
            base_commit = base_commit.or(base.map(|hash| hash.trim().to_owned()));
            let diff = decoded.path().join(format!("{:04}.patch", index + 1));
            let subject = decode(mail, &diff)?;
            if shell::read(&diff)?.windows(5).any(|part| part == b"diff " || part == b"\n@@ -") {
                patches.push(MailedPatch { subject, path: diff });
            }
        }
        if patches.is_empty() {
            let none = io::Error::new(
                io::ErrorKind::InvalidData,
                "it has no patch: set --patches to an mbox file, or to a directory of *.patch \
                 files as `git format-patch` writes them",
            );
            return Err(failed(none).into());
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, base_commit, patches, _decoded: decoded })
    }
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

/// Writes the diff of a mail to a file, and returns the mail's subject without `[PATCH n/m]`.
fn decode(mail: &Path, diff: &Path) -> Result<String, CommandError> {
    let info = git(format!("decoding {}", mail.display()))
        .args(["mailinfo", "--no-scissors", "--encoding=UTF-8", "/dev/null"])
        .arg(diff)
        .input(mail)
        .query()?;
    let subject = info.lines().find_map(|line| line.strip_prefix("Subject: "));
    Ok(subject.unwrap_or("(no subject)").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COVER: &str = "From 0 Mon Sep 17 00:00:00 2001\nFrom: A <a@example>\n\
                         Subject: [PATCH 0/2] Cover\n\nText\n\nbase-commit: 0123abcd\n\n";

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
