// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `stage2/linux/send`: mails of a series, which `git am` applies.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/stage2/linux/send");

/// A Linux tree with one file, the series `one`, and the series `two` that requires it.
struct Sender(TempDir);

impl Sender {
    fn new() -> Self {
        let sender = Self(tempfile::tempdir().unwrap());
        let tree = sender.path("linux");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("f"), "1\n").unwrap();
        sender.git(&["init", "-q", "."]);
        sender.git(&["add", "f"]);
        sender.git(&[
            "-c",
            "user.name=Test",
            "-c",
            "user.email=test@example.org",
            "commit",
            "-q",
            "-m",
            "Base",
        ]);
        for (name, after, old, trailer) in
            [("one", "", 1, "Fixes: 0123456789ab (\"x\")\n"), ("two", "# after: one\n", 2, "")]
        {
            let folder = sender.path("5.10").join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("series"), format!("{after}0001-Write.patch\n")).unwrap();
            fs::write(folder.join("0001-Write.patch"), patch(name, old, trailer)).unwrap();
            let cover = "SPDX-License-Identifier: GPL-2.0-only\nFrom: Granule developers <g@example>\n\
                         Date: x\nSubject: [PATCH 0/1] Write\n\nText.\n\nBase: Linux 5.10.\n\n\
                         Granule developers (1):\n Write\n";
            fs::write(folder.join("cover-letter.txt"), cover).unwrap();
        }
        sender
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Sets the name and the address of the sender.
    fn set_user(&self, name: &str) {
        let text = format!("[user]\n\tname = \"{name}\"\n\temail = sender@example.org\n");
        fs::write(self.path("config"), text).unwrap();
    }

    fn command(&self, program: &str, directory: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(directory)
            .env("HOME", self.0.path())
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", self.path("config"))
            .env("GIT_CEILING_DIRECTORIES", self.0.path());
        command
    }

    fn git(&self, args: &[&str]) -> String {
        let output = self.command("git", &self.path("linux")).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn send(&self, args: &[&str]) -> Output {
        self.command(SCRIPT, self.0.path()).args(args).output().unwrap()
    }

    fn mail(&self, name: &str) -> String {
        fs::read_to_string(self.path("mails").join(name)).unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn patch(name: &str, old: u32, trailer: &str) -> String {
    format!(
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n\
         From: Granule developers <g@example>\nDate: Sat, 21 Nov 2026 00:00:01 +0000\n\
         Subject: [PATCH 1/1] Write {name}\n\nBody.\n\n{trailer}---\n f | 2 +-\n\n\
         diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-{old}\n+{}\n",
        old + 1
    )
}

#[test]
fn a_sender_without_name_is_refused() {
    let sender = Sender::new();
    let refused = |reason: &str| {
        let output = sender.send(&["5.10/one"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
        assert!(!sender.path("mails").exists());
    };

    refused("git config has no user.name");
    fs::write(sender.path("config"), "[user]\n\tname = A\n").unwrap();
    refused("git config has no user.email");
}

#[test]
fn git_applies_the_mails_with_the_sender_as_author() {
    for name in ["Ann Example", "A. Example, Jr", "A. Döe"] {
        let sender = Sender::new();
        sender.set_user(name);

        let sent = sender.send(&["5.10/one", "--out", "mails", "--tree", "linux", "HEAD"]);

        assert!(sent.status.success(), "{}", text(&sent.stderr));
        let mails = sender.path("mails/0001-Write.patch");
        sender.git(&["am", "-q", &mails.display().to_string()]);
        let author = format!("{name} <sender@example.org>");
        assert_eq!(sender.git(&["log", "-1", "--format=%an <%ae>"]).trim(), author);
        let message = sender.git(&["log", "-1", "--format=%B"]);
        let trailers = format!("Fixes: 0123456789ab (\"x\")\nSigned-off-by: {author}");
        assert_eq!(message.trim(), format!("Write one\n\nBody.\n\n{trailers}"));
        let commit = sender.git(&["rev-parse", "HEAD~1"]);
        let cover = sender.mail("0000-cover-letter.patch");
        assert!(cover.contains(&format!("\nbase-commit: {commit}")), "{cover}");
        assert!(cover.contains(&format!("\n{name} (1):\n")) && !cover.contains("SPDX"), "{cover}");
    }
}

#[test]
fn a_required_series_is_a_prerequisite() {
    let sender = Sender::new();
    sender.set_user("A");

    let sent =
        sender.send(&["5.10/two", "--out", "mails", "--reroll", "3", "--tree", "linux", "HEAD"]);

    assert!(sent.status.success(), "{}", text(&sent.stderr));
    let cover = sender.mail("0000-cover-letter.patch");
    assert_eq!(cover.matches("prerequisite-patch-id: ").count(), 1);
    assert!(cover.contains("\nSubject: [PATCH v3 0/1] Write\n"));
    assert!(sender.mail("0001-Write.patch").contains("\n\nBody.\n\nSigned-off-by: A <"));
    assert_eq!(sender.git(&["status", "--porcelain"]), "");
}

#[test]
fn unusable_input_is_refused_with_the_reason() {
    let sender = Sender::new();
    sender.set_user("A");
    fs::write(sender.path("linux/f"), "7\n").unwrap();
    sender.git(&["commit", "-q", "-a", "-m", "Other"]);
    fs::create_dir(sender.path("full")).unwrap();
    fs::write(sender.path("full/file"), "").unwrap();
    for (args, code, reason) in [
        (&["5.10/one", "--tree", "linux", "HEAD"][..], 1, "does not apply to HEAD of linux"),
        (&["5.10/one", "--tree", "linux", "v1"], 2, "'v1' is no commit of linux"),
        (&["5.10/one", "--out", "full"], 2, "full exists and is not empty"),
        (&["5.10/three"], 2, "has no file 'series'"),
        (&["5.10/one", "--reroll", "x"], 2, "--reroll requires a number"),
        (&[], 2, "requires a series"),
    ] {
        let output = sender.send(args);

        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(reason), "{args:?}: {error}");
        assert!(!sender.path("mails").exists());
    }
}
