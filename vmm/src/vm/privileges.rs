// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Drops the privileges of the process.
//!
//! The process changes to `--user` and `--group` after it has opened all files. It then has no
//! supplementary groups and no capabilities, and a program that it starts cannot gain any
//! (`no_new_privs`, empty bounding set). A final check verifies that it cannot regain root.
//!
//! Names are looked up in `/etc/passwd` and `/etc/group`. A user from another source (LDAP) must be
//! specified by number.

use std::{fmt, fs, io};

use rustix::{
    process::{getgid, getgroups, getuid},
    thread::{
        CapabilitySet, CapabilitySets, Gid, Uid, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

use super::outcome::{VmError, failed};

/// The user and group that a process changes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// User ID.
    pub user: u32,
    /// Group ID, without supplementary groups.
    pub group: u32,
}

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

impl Identity {
    /// Looks up the values of `--user` and `--group`; returns `None` if both are absent.
    ///
    /// # Errors
    /// The user or group does not exist, or is root.
    pub fn find(user: Option<&str>, group: Option<&str>) -> Result<Option<Self>, VmError> {
        let read = |file: &str| fs::read_to_string(file).map_err(lookup_failed(file));
        find(user, group, || read(PASSWD), || read(GROUP))
    }

    /// Calls `action` with the permissions of this user and group, and returns to those of the process,
    /// which is root.
    ///
    /// # Errors
    /// The kernel refuses a change. The process must end then, as it may have some of the permissions.
    pub fn act<T>(self, action: impl FnOnce() -> T) -> Result<T, VmError> {
        let own = check_is_root()?;
        let failed = |call: &str| failed(format!("{call} failed"));
        let (user, group, groups) = (getuid(), getgid(), getgroups().map_err(failed("getgroups"))?);
        set_thread_groups(&[]).map_err(failed("setgroups"))?;
        set_thread_res_gid(group, Gid::from_raw(self.group), group).map_err(failed("setresgid"))?;
        set_thread_res_uid(user, Uid::from_raw(self.user), user).map_err(failed("setresuid"))?;
        let none = CapabilitySets { effective: CapabilitySet::empty(), ..own };
        set_capabilities(None, none).map_err(failed("capset"))?;
        let result = action();
        set_thread_res_uid(user, user, user).map_err(failed("setresuid"))?;
        set_capabilities(None, own).map_err(failed("capset"))?;
        set_thread_res_gid(group, group, group).map_err(failed("setresgid"))?;
        set_thread_groups(&groups).map_err(failed("setgroups"))?;
        Ok(result)
    }

    /// Changes user and group irrevocably and drops all capabilities.
    ///
    /// # Errors
    /// The process has several threads, or the kernel refuses the change.
    pub fn drop_privileges(self) -> Result<(), VmError> {
        let tasks = fs::read_dir("/proc/self/task");
        let threads = tasks.map_err(failed("reading /proc/self/task failed"))?.count();
        let failed = |call: &str| failed(format!("{call} failed"));
        if threads != 1 {
            return refuse(format_args!(
                "the process has {threads} threads; privileges can be dropped by a single thread \
                 only"
            ));
        }
        check_is_root()?;
        set_no_new_privs(true).map_err(failed("PR_SET_NO_NEW_PRIVS"))?;
        for capability in CapabilitySet::all().iter() {
            match remove_capability_from_bounding_set(capability) {
                // This kernel does not have the capability.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(error) => return Err(failed("PR_CAPBSET_DROP")(error)),
            }
        }
        let (user, group) = (Uid::from_raw(self.user), Gid::from_raw(self.group));
        set_thread_groups(&[]).map_err(failed("setgroups"))?;
        set_thread_res_gid(group, group, group).map_err(failed("setresgid"))?;
        set_thread_res_uid(user, user, user).map_err(failed("setresuid"))?;
        match clear_ambient_capability_set() {
            // Linux before 4.3 has no ambient set.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(failed("PR_CAP_AMBIENT_CLEAR_ALL")(error)),
        }
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, none).map_err(failed("capset"))?;
        self.verify()
    }

    /// Verifies user and group, and that the process cannot become root again.
    fn verify(self) -> Result<(), VmError> {
        let same = (getuid().as_raw(), getgid().as_raw()) == (self.user, self.group);
        if !same || set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_ok() {
            return refuse(format_args!(
                "the process can regain root after dropping it: do not run it on this kernel"
            ));
        }
        Ok(())
    }
}

/// Returns the capabilities of the process, if it may change its user.
fn check_is_root() -> Result<CapabilitySets, VmError> {
    let own = capabilities(None).map_err(failed("capget failed"))?;
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::SETPCAP;
    if own.effective.contains(needed) {
        return Ok(own);
    }
    refuse(format_args!(
        "--user: only root can change the user, and this process runs as user {}: start it as root \
         (sudo), or remove --user",
        getuid().as_raw()
    ))
}

fn refuse<T>(why: fmt::Arguments<'_>) -> Result<T, VmError> {
    Err(VmError::Refused(why.to_string()))
}

fn lookup_failed(file: &str) -> impl FnOnce(io::Error) -> VmError {
    failed(format!("{file} cannot be read to look up a name: use numbers"))
}

fn find(
    user: Option<&str>,
    group: Option<&str>,
    passwd: impl Fn() -> Result<String, VmError>,
    groups: impl Fn() -> Result<String, VmError>,
) -> Result<Option<Identity>, VmError> {
    let Some(name) = user else {
        return group.map_or(Ok(None), |group| {
            refuse(format_args!("--group {group} needs --user: the user would keep its privileges"))
        });
    };
    let unknown = |option, name, file| {
        VmError::Refused(format!(
            "{option} {name}: no such name in {file}; use another name or a number"
        ))
    };
    let number = name.parse::<u32>().ok();
    let passwd = match (number, group) {
        (Some(_), Some(_)) => String::new(),
        _ => passwd()?,
    };
    // NAME:PASSWORD:UID:GID:…
    let matches = |row: &[&str]| row.first() == Some(&name) || row.get(2) == Some(&name);
    let row = find_row(&passwd, matches).unwrap_or_default();
    let user =
        number.or_else(|| numeric_field(&row, 2)).ok_or_else(|| unknown("--user", name, PASSWD))?;
    if user == 0 {
        return refuse(format_args!(
            "--user {name} is root and keeps all privileges: use another user, or remove --user"
        ));
    }
    let group = match group {
        None => numeric_field(&row, 3).ok_or_else(|| {
            VmError::Refused(format!(
                "--user {user} is not in /etc/passwd, so its group is unknown: add --group"
            ))
        })?,
        Some(name) => match name.parse() {
            Ok(number) => number,
            Err(_) => {
                let groups = groups()?;
                let row = find_row(&groups, |row| row.first() == Some(&name));
                row.and_then(|row| numeric_field(&row, 2))
                    .ok_or_else(|| unknown("--group", name, GROUP))?
            }
        },
    };
    if group == 0 {
        return refuse(format_args!(
            "--user {name} has root's group, which keeps access to its files: set another --group"
        ));
    }
    Ok(Some(Identity { user, group }))
}

/// Returns the colon-separated fields of the first row that `matches` accepts.
fn find_row(file: &str, matches: impl Fn(&[&str]) -> bool) -> Option<Vec<&str>> {
    file.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|row| matches(row))
}

fn numeric_field(row: &[&str], at: usize) -> Option<u32> {
    row.get(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_in_test_files(
        user: Option<&str>,
        group: Option<&str>,
    ) -> Result<Option<Identity>, String> {
        let passwd = "root:x:0:0::/root:/bin/sh\nvm:x:990:36::/nonexistent:/bin/false\n";
        let groups = "root:x:0:\nkvm:x:36:\nvm:x:990:\n";
        let done = find(user, group, || Ok(passwd.into()), || Ok(groups.into()));
        done.map_err(|error| error.to_string())
    }

    #[test]
    fn find_accepts_names_and_numbers() {
        let is = |user, group| Ok(Some(Identity { user, group }));

        assert_eq!(find_in_test_files(None, None), Ok(None));
        assert_eq!(find_in_test_files(Some("vm"), None), is(990, 36));
        assert_eq!(find_in_test_files(Some("990"), None), is(990, 36));
        assert_eq!(find_in_test_files(Some("vm"), Some("vm")), is(990, 990));
        assert_eq!(find_in_test_files(Some("4242"), Some("4343")), is(4242, 4343));
    }

    #[test]
    fn each_error_names_cause_and_remedy() {
        for (user, group, why) in [
            (Some("nobody2"), None, "no such name in /etc/passwd"),
            (Some("4242"), None, "add --group"),
            (Some("vm"), Some("wheel"), "no such name in /etc/group"),
            (Some("root"), None, "keeps all privileges"),
            (Some("0"), Some("vm"), "keeps all privileges"),
            (Some("4242"), Some("root"), "root's group"),
            (Some("4242"), Some("0"), "root's group"),
            (None, Some("vm"), "needs --user"),
        ] {
            let error = find_in_test_files(user, group).unwrap_err();
            assert!(error.contains(why), "{user:?} {group:?}: {error}");
        }
    }

    #[test]
    fn an_action_has_the_permissions_of_the_user_only_while_it_lasts() {
        if !getuid().is_root() {
            return granule_types::testing::skip("the test needs root");
        }
        let nobody = Identity { user: 4242, group: 4343 };
        let read = || fs::read("/etc/shadow").map_err(|error| error.kind()).map(drop);
        let status = || {
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            let is_permission = |line: &&str| {
                ["Uid:", "Gid:", "Groups:", "Cap"].iter().any(|name| line.starts_with(name))
            };
            status.lines().filter(is_permission).collect::<Vec<_>>().join("\n")
        };
        let before = status();

        let (denied, during) = nobody.act(|| (read(), status())).unwrap();

        assert_eq!(denied, Err(io::ErrorKind::PermissionDenied));
        for line in ["Uid:\t0\t4242\t0\t4242", "Gid:\t0\t4343\t0\t4343", "Groups:\t \n"] {
            assert!(during.contains(line), "{line}: {during}");
        }
        assert!(during.contains("CapEff:\t0000000000000000"), "{during}");
        assert_eq!(read(), Ok(()));
        assert_eq!(status(), before);
    }

    /// Drops privileges in a child process, because the change is irrevocable and needs one thread.
    #[test]
    fn drop_privileges_removes_all_privileges_of_root() {
        if !getuid().is_root() {
            return granule_types::testing::skip("the test needs root");
        }
        // SAFETY: the child makes system calls only and exits.
        let child = match unsafe { libc::fork() } {
            0 => {
                let assumed = Identity { user: 4242, group: 4343 }.drop_privileges();
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
                // SAFETY: the call ends the child without running destructors.
                unsafe { libc::_exit(i32::from(!right)) }
            }
            child => child,
        };
        let mut status = -1;
        // SAFETY: `child` is a child process of this process.
        unsafe { libc::waitpid(child, &raw mut status, 0) };

        assert_eq!(status, 0);
    }
}
