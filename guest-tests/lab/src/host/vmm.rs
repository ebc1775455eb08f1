// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A user's VMM, which boots the guest of `granule lab guest` in place of `granule run`.
//!
//! Marks and counts are the same for all VMMs: PID 1 of the emulated host marks the start and the end
//! of the program, and the guest's PID 1 marks its own start.

use granule_types::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{
    error::with_causes,
    host::program::{self, Program},
};

/// A program and its arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vmm {
    pub program: Program,
    /// Arguments, in which [`Vmm::argv`] replaces names in braces.
    arguments: Vec<String>,
}

impl Vmm {
    /// Opens the program of a command line, whose words are separated as in a shell.
    ///
    /// # Errors
    /// A message, if the quotes are not closed, the program cannot run in the emulated host, or a file
    /// of the guest is not among the arguments: the lab's, or one of the program's directory.
    pub fn parse(command: &str) -> Result<Self, String> {
        let words = shlex::split(command).ok_or("a quote is not closed")?;
        let [path, arguments @ ..] = words.as_slice() else {
            return Err("the program is missing".to_owned());
        };
        let own_file = format!("{}/", program::DIRECTORY);
        let count = |name: &str| arguments.iter().filter(|text| text.contains(name)).count();
        let mut missing = ["{kernel}", "{initrd}"].into_iter().filter(|name| count(name) == 0);
        // Each of the two may be a file of the directory instead.
        if let Some(name) = missing.nth(count(&own_file)) {
            return Err(format!(
                "no argument contains {name}, the path of a file of the guest, nor the path of one \
                 of the program's directory ({own_file}FILE)"
            ));
        }
        let program = Program::open(path.as_ref()).map_err(|error| with_causes(&error))?;
        Ok(Self { program, arguments: arguments.to_vec() })
    }

    /// Returns the command in the emulated host for a guest with these files, vCPUs and memory.
    pub fn argv(&self, (kernel, initrd): (&str, &str), vcpus: u32, memory: Bytes) -> Vec<String> {
        let values = [
            ("{kernel}", kernel.to_owned()),
            ("{initrd}", initrd.to_owned()),
            ("{vcpus}", vcpus.to_string()),
            ("{mebibytes}", (memory.0 >> 20).to_string()),
        ];
        let replace = |argument: &String| {
            values.iter().fold(argument.clone(), |text, (name, value)| text.replace(name, value))
        };
        let arguments = self.arguments.iter().map(replace);
        [program::PATH.to_owned()].into_iter().chain(arguments).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::host::program::tests::arm64_program;

    #[test]
    fn the_command_names_the_files_and_the_size_of_the_guest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmm");
        fs::write(&path, arm64_program()).unwrap();
        let command = |arguments: &str| format!("{} {arguments}", path.display());

        let vmm =
            Vmm::parse(&command("-k {kernel} -i {initrd} -p 'a b' -m {mebibytes}M -c {vcpus}"));

        let argv = vmm.unwrap().argv(("/image", "/cpio"), 2, Bytes::mib(256));
        let expected = "/workload/run -k /image -i /cpio -p|a b|-m 256M -c 2";
        assert_eq!(argv.join(" "), expected.replace('|', " "));
        assert_eq!(argv[6], "a b");
        for (arguments, why) in
            [("-k {kernel}", "{initrd}"), ("'", "quote is not closed"), ("{initrd}", "{kernel}")]
        {
            let error = Vmm::parse(&command(arguments)).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let own = Vmm::parse(&command("{kernel} --initrd=/workload/guest.cpio"));
        assert_eq!(
            own.unwrap().argv(("/i", "/c"), 1, Bytes(0))[2],
            "--initrd=/workload/guest.cpio"
        );
        let missing = Vmm::parse("/none {kernel} {initrd}").unwrap_err();
        assert!(missing.contains("/none"), "{missing}");
    }
}
