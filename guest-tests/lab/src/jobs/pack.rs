// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packs the initramfs of a job, or prints as shell how to.

use std::{io, path::Path};

use crate::{
    command::{CommandError, quote},
    host::{
        guest_init,
        initramfs::{self, Initramfs},
        job::{FACTS_PATH, FOREIGN_PATH, JOB_PATH},
    },
    jobs::planned_job::{Guest, PlannedJob},
    kernel::Kernel,
    shell::{self, Shell},
};

/// Contents of an initramfs.
#[derive(Debug)]
pub struct Contents<'a> {
    /// The static arm64 `granule`.
    pub init: &'a Path,
    pub kernel: &'a Kernel,
    pub job: &'a PlannedJob,
    /// The serialized job.
    pub job_text: &'a str,
    /// The serialized facts.
    pub facts_text: &'a str,
}

impl Contents<'_> {
    fn has_own_guest(&self) -> bool {
        self.job.guest == Some(Guest::Own)
    }

    /// Writes the archive.
    pub fn pack(&self, initramfs: &Path) -> Result<(), CommandError> {
        let init = shell::read(self.init)?;
        let foreign = self.job.foreign.as_deref().map(shell::read).transpose()?;
        let own_guest = self.has_own_guest();
        let image = own_guest.then(|| shell::read(&self.kernel.image)).transpose()?;
        let files = self.job.guest.iter().flat_map(Guest::files);
        let files = files
            .map(|(file, path)| Ok((shell::read(&file)?, path)))
            .collect::<Result<Vec<_>, CommandError>>()?;
        let pack = || -> io::Result<()> {
            let mut archive = Initramfs::new(Vec::new())?;
            archive.program("/init", &init)?;
            if let Some(image) = image {
                archive.file(Guest::IMAGE, &image)?;
                let mut inner = Initramfs::new(Vec::new())?;
                inner.program("/init", &init)?;
                inner.file(guest_init::MARKER, b"")?;
                archive.file(Guest::INITRD, &inner.finish()?)?;
            }
            for (content, path) in &files {
                archive.file(path, content)?;
            }
            if let Some(foreign) = foreign {
                archive.program(FOREIGN_PATH, &foreign)?;
            }
            archive.file(JOB_PATH, self.job_text.as_bytes())?;
            archive.file(FACTS_PATH, self.facts_text.as_bytes())?;
            initramfs::write_sparse(&archive.finish()?, initramfs)
        };
        pack().map_err(|e| CommandError::file("write", initramfs, e))
    }

    /// Prints how to build an equivalent archive from a directory.
    pub fn print(
        &self,
        shell: Shell,
        directory: &Path,
        initramfs: &Path,
    ) -> Result<(), CommandError> {
        let root = directory.join("initramfs");
        let create_dirs = |root: &Path| {
            ["dev", "proc", "sys", "tmp"]
                .iter()
                .try_for_each(|name| shell.create_dir(&root.join(name)))
        };
        create_dirs(&root)?;
        shell.copy(self.init, &root.join("init"))?;
        if let Some(program) = &self.job.foreign {
            shell.copy(program, &root.join("test"))?;
        }
        if self.has_own_guest() {
            let guest = root.join("guest");
            create_dirs(&guest)?;
            shell.copy(self.init, &guest.join("init"))?;
            shell.write(&guest.join("guest"), "")?;
            shell.print(format_args!(
                "(cd {} && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0) >{}",
                quote(&guest),
                quote(root.join("guest.cpio"))
            ));
            shell.copy(&self.kernel.image, &root.join("guest.image"))?;
        }
        for (file, path) in self.job.guest.iter().flat_map(Guest::files) {
            shell.copy(&file, &root.join(path.trim_start_matches('/')))?;
        }
        shell.write(&root.join("job.json"), self.job_text)?;
        shell.write(&root.join("facts.json"), self.facts_text)?;
        shell.print(format_args!(
            "(cd {} && find . | LC_ALL=C sort | cpio -o -H newc --reproducible -R 0:0) >{}",
            quote(&root),
            quote(initramfs)
        ));
        Ok(())
    }
}
