// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this process may do because of who started it, and giving that up.
//!
//! `--user` and `--group` name whom the process becomes once everything it needs is open. It then has
//! no supplementary groups and no capabilities, neither its own nor any that a program it started
//! could gain (`no_new_privs`, and an empty bounding set), and none of that comes back: this is tried.
//!
//! Names are looked up in `/etc/passwd` and `/etc/group`; those that only another service knows (LDAP)
//! are given as numbers.

use std::{fs, io};

use rustix::{
    process::{getgid, getuid},
    thread::{
        CapabilitySet, CapabilitySets, Gid, Uid, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};
use thiserror::Error;

/// Why the process keeps its rights, and does not start.
#[derive(Debug, Error)]
pub enum PrivilegeError {
    /// A file with the names cannot be read.
    #[error("{0} cannot be read to look a name up: give numbers")]
    Names(&'static str, #[source] io::Error),
    /// Nobody has this name.
    #[error("{option} {name}: no such name in {file}; use one that is there, or a number")]
    NoName {
        /// The option.
        option: &'static str,
        /// The name.
        name: String,
        /// Where it should be.
        file: &'static str,
    },
    /// The number is nobody's, so its group is not known.
    #[error("--user {0} is not in /etc/passwd, so its group is not known: give it with --group")]
    NoGroup(u32),
    /// The user is root, which can do everything.
    #[error("--user {0} is root, who keeps all rights: name another user, or leave --user out")]
    Root(String),
    /// A group but no user.
    #[error("--group {0} alone leaves the user's rights: give --user too")]
    GroupAlone(String),
    /// The process may not become somebody else.
    #[error(
        "only root can become another user: start it as root (sudo), or leave --user out, as it has \
         user {0}'s rights only"
    )]
    NotRoot(u32),
    /// Another thread would keep its rights.
    #[error("{0} threads run already; rights can only be given up by one for all")]
    Threads(usize),
    /// The kernel refuses.
    #[error("{doing} failed")]
    Call {
        /// What was tried.
        doing: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// They came back.
    #[error("the rights of root could be had back: this host's kernel is not to be trusted")]
    CameBack,
}

/// Whom a process becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// User.
    pub user: u32,
    /// Group; there are no others.
    pub group: u32,
}

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

impl Identity {
    /// Looks up what `--user` and `--group` say; `None` where neither says anything.
    ///
    /// # Errors
    /// There is no such user or group, or it is root.
    pub fn find(user: Option<&str>, group: Option<&str>) -> Result<Option<Self>, PrivilegeError> {
        let read = |file| fs::read_to_string(file).map_err(|e| PrivilegeError::Names(file, e));
        find(user, group, || read(PASSWD), || read(GROUP))
    }

    /// Becomes it, for good. The process must have one thread only.
    ///
    /// # Errors
    /// The process has no right to, or the kernel refuses.
    pub fn assume(self) -> Result<(), PrivilegeError> {
        let call = |doing| {
            move |error: rustix::io::Errno| PrivilegeError::Call {
                doing,
                source: error.into(),
            }
        };
        let threads = fs::read_dir("/proc/self/task")
            .map_err(|error| PrivilegeError::Names("/proc/self/task", error))?;
        match threads.count() {
            1 => {}
            count => return Err(PrivilegeError::Threads(count)),
        }
        let own = capabilities(None).map_err(call("reading the capabilities (capget)"))?;
        let needed = CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::SETPCAP;
        if !own.effective.contains(needed) {
            return Err(PrivilegeError::NotRoot(getuid().as_raw()));
        }
        set_no_new_privs(true).map_err(call("giving up new privileges (PR_SET_NO_NEW_PRIVS)"))?;
        for capability in CapabilitySet::all().iter() {
            match remove_capability_from_bounding_set(capability) {
                // One that this kernel does not know.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(error) => {
                    return Err(call("emptying the bounding set (PR_CAPBSET_DROP)")(error));
                }
            }
        }
        let (user, group) = (Uid::from_raw(self.user), Gid::from_raw(self.group));
        set_thread_groups(&[]).map_err(call("leaving all groups (setgroups)"))?;
        set_thread_res_gid(group, group, group).map_err(call("changing the group (setresgid)"))?;
        set_thread_res_uid(user, user, user).map_err(call("changing the user (setresuid)"))?;
        match clear_ambient_capability_set() {
            // A kernel before 4.3 has none.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(call("emptying the ambient set (PR_CAP_AMBIENT)")(error)),
        }
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, none).map_err(call("giving up capabilities (capset)"))?;
        self.check()
    }

    /// Whether the process is nobody else and cannot become root again.
    fn check(self) -> Result<(), PrivilegeError> {
        let same = (getuid().as_raw(), getgid().as_raw()) == (self.user, self.group);
        if !same || set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_ok() {
            return Err(PrivilegeError::CameBack);
        }
        Ok(())
    }
}

fn find(
    user: Option<&str>,
    group: Option<&str>,
    passwd: impl Fn() -> Result<String, PrivilegeError>,
    groups: impl Fn() -> Result<String, PrivilegeError>,
) -> Result<Option<Identity>, PrivilegeError> {
    let Some(name) = user else {
        return group.map_or(Ok(None), |group| {
            Err(PrivilegeError::GroupAlone(group.to_owned()))
        });
    };
    let unknown = |option, name: &str, file| PrivilegeError::NoName {
        option,
        name: name.to_owned(),
        file,
    };
    // NAME:PASSWORD:UID:GID:…
    let (user, own) = match name.parse::<u32>() {
        Ok(number) if group.is_some() => (number, None),
        Ok(number) => {
            let passwd = passwd()?;
            let row = row(&passwd, |row| row.get(2) == Some(&name));
            let own = row.ok_or(PrivilegeError::NoGroup(number))?;
            (number, field(&own, 3))
        }
        Err(_) => {
            let passwd = passwd()?;
            let row = row(&passwd, |row| row.first() == Some(&name));
            let row = row.ok_or_else(|| unknown("--user", name, PASSWD))?;
            let number = field(&row, 2).ok_or_else(|| unknown("--user", name, PASSWD))?;
            (number, field(&row, 3))
        }
    };
    if user == 0 {
        return Err(PrivilegeError::Root(name.to_owned()));
    }
    let group = match group {
        None => own.ok_or(PrivilegeError::NoGroup(user))?,
        Some(name) => match name.parse() {
            Ok(number) => number,
            Err(_) => {
                let groups = groups()?;
                let row = row(&groups, |row| row.first() == Some(&name));
                let number = row.and_then(|row| field(&row, 2));
                number.ok_or_else(|| unknown("--group", name, GROUP))?
            }
        },
    };
    Ok(Some(Identity { user, group }))
}

/// The first row of a file of fields between colons that is `right`.
fn row(file: &str, right: impl Fn(&[&str]) -> bool) -> Option<Vec<&str>> {
    file.lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|row| right(row))
}

fn field(row: &[&str], at: usize) -> Option<u32> {
    row.get(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(user: Option<&str>, group: Option<&str>) -> Result<Option<Identity>, String> {
        let passwd = "root:x:0:0::/root:/bin/sh\nvm:x:990:36::/nonexistent:/bin/false\n";
        let groups = "root:x:0:\nkvm:x:36:\nvm:x:990:\n";
        let done = find(user, group, || Ok(passwd.into()), || Ok(groups.into()));
        done.map_err(|error| error.to_string())
    }

    #[test]
    fn users_and_groups_are_found_by_name_and_number() {
        let is = |user, group| Ok(Some(Identity { user, group }));

        assert_eq!(found(None, None), Ok(None));
        assert_eq!(found(Some("vm"), None), is(990, 36));
        assert_eq!(found(Some("990"), None), is(990, 36));
        assert_eq!(found(Some("vm"), Some("vm")), is(990, 990));
        assert_eq!(found(Some("4242"), Some("4343")), is(4242, 4343));
    }

    #[test]
    fn what_cannot_be_says_why_and_what_to_do() {
        for (user, group, why) in [
            (Some("nobody2"), None, "no such name in /etc/passwd"),
            (Some("4242"), None, "give it with --group"),
            (Some("vm"), Some("wheel"), "no such name in /etc/group"),
            (Some("root"), None, "keeps all rights"),
            (Some("0"), Some("vm"), "keeps all rights"),
            (None, Some("vm"), "give --user too"),
        ] {
            let error = found(user, group).unwrap_err();
            assert!(error.contains(why), "{user:?} {group:?}: {error}");
        }
    }

    /// In a process of its own, with one thread: what is given up stays given up.
    #[test]
    fn nothing_is_left_of_roots_rights() {
        if !getuid().is_root() {
            return granule_types::testing::skip("the test needs root");
        }
        // SAFETY: the child does nothing but system calls and an exit.
        let child = match unsafe { libc::fork() } {
            0 => {
                let assumed = Identity {
                    user: 4242,
                    group: 4343,
                }
                .assume();
                let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
                let has = |name: &str, value: &str| {
                    let line = status.lines().find_map(|line| line.strip_prefix(name));
                    line.is_some_and(|line| line.split_whitespace().eq(value.split_whitespace()))
                };
                let none = "0000000000000000";
                let right = assumed.is_ok()
                    && has("Uid:", "4242 4242 4242 4242")
                    && has("Gid:", "4343 4343 4343 4343")
                    && has("Groups:", "")
                    && ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"]
                        .iter()
                        .all(|set| has(set, none))
                    && has("NoNewPrivs:", "1")
                    && fs::read("/etc/shadow").is_err();
                // SAFETY: ends the child at once, running nothing more of it.
                unsafe { libc::_exit(i32::from(!right)) }
            }
            child => child,
        };
        let mut status = -1;
        // SAFETY: the child is this process's own.
        unsafe { libc::waitpid(child, &raw mut status, 0) };

        assert_eq!(status, 0);
    }
}
