// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A bootable kernel, and the addresses of functions whose calls are counted.

use std::{
    io, iter,
    ops::Range,
    path::{Path, PathBuf},
};

use granule_types::record::Series;

use crate::{
    command::CommandError,
    kernel::{recipe::Recipe, toolchain::Toolchain},
    shell::{self, sha256},
    values::{LinuxVersion, PageSize},
};

/// Magic number of an arm64 image and its offset (`Documentation/arch/arm64/booting.rst`, 4).
const IMAGE_MAGIC: &[u8] = b"ARM\x64";
const MAGIC_OFFSET: usize = 0x38;
/// Offset of the flags of an arm64 image.
const FLAGS_OFFSET: usize = 0x18;

/// Function in which a kernel builds its page tables.
pub const PAGING_FUNCTION: &str = "paging_init";

#[derive(Debug, Clone, Default)]
pub struct Kernel {
    /// Name in the run directory: `base`, or the series.
    pub name: String,
    pub image: PathBuf,
    pub image_sha256: String,
    pub page_size: PageSize,
    /// Configuration, if known.
    pub config: Option<PathBuf>,
    /// Subject of the last patch or commit, if known.
    pub title: Option<String>,
    /// Series applied to the source, if known.
    pub series: Option<Vec<Series>>,
    /// Hash of the commit, if the source is one.
    pub commit: Option<String>,
    /// Git tree of the source, if known.
    pub tree: Option<String>,
    /// `System.map`, if known.
    pub system_map: Option<PathBuf>,
    /// `vmlinux`, if known.
    pub vmlinux: Option<PathBuf>,
    /// Compiler, if known.
    pub compiler: Option<String>,
    /// Names and addresses of functions whose calls are counted.
    pub functions: Vec<(String, u64)>,
    /// Counts whose functions the kernel lacks or inlines, or all without a `System.map`.
    pub uncounted: Vec<&'static str>,
}

impl Kernel {
    /// Opens an image. `System.map` and the configuration are in its directory or, in a build tree,
    /// in the top directory.
    pub fn open(name: String, image: &Path) -> Result<Self, CommandError> {
        let content = shell::read(image)?;
        if content.get(MAGIC_OFFSET..MAGIC_OFFSET + IMAGE_MAGIC.len()) != Some(IMAGE_MAGIC) {
            let not_image = io::Error::new(
                io::ErrorKind::InvalidData,
                "it is not an arm64 kernel image: pass an uncompressed Image, as a build leaves it \
                 in arch/arm64/boot",
            );
            return Err(CommandError::file("boot", image, not_image));
        }
        let flags =
            content[FLAGS_OFFSET..].first_chunk().map_or(0, |flags| u64::from_le_bytes(*flags));
        let find = |names: &[&str]| {
            let boot = image.parent().unwrap_or(Path::new("."));
            // In another directory, a file of the top directory may be that of another build.
            let is_tree = boot.ends_with("arch/arm64/boot");
            let root = boot.ancestors().nth(3).filter(|_| is_tree);
            iter::once(boot)
                .chain(root)
                .flat_map(|directory| names.iter().map(|name| directory.join(name)))
                .find(|path| path.is_file())
        };
        let system_map = find(&["System.map"]);
        let functions = match &system_map {
            Some(map) => counted_functions(&String::from_utf8_lossy(&shell::read(map)?)),
            None => Vec::new(),
        };
        Ok(Self {
            name,
            image: image.to_owned(),
            image_sha256: sha256(&content),
            page_size: PageSize::of_image_flags(flags).unwrap_or_default(),
            config: find(&[".config", "config"]),
            system_map,
            vmlinux: find(&["vmlinux"]),
            uncounted: uncounted(&functions),
            functions,
            ..Self::default()
        })
    }

    /// Returns the address of a function that a run requires.
    ///
    /// # Errors
    /// No `System.map` is beside the image, or it lacks the function.
    pub fn required_function(&self, name: &str) -> Result<u64, CommandError> {
        let missing = |reason: String| io::Error::new(io::ErrorKind::NotFound, reason);
        let Some(path) = &self.system_map else {
            let reason = format!(
                "it has no System.map, which has the address of {name}: copy the one of its build \
                 beside it"
            );
            return Err(CommandError::file("measure", &self.image, missing(reason)));
        };
        let map = shell::read(path)?;
        function_address(&String::from_utf8_lossy(&map), name).ok_or_else(|| {
            let reason = format!("it lacks {name}, which the run measures");
            CommandError::file("use", path, missing(reason))
        })
    }

    /// Returns the addresses of the linear map, by those of the image.
    ///
    /// # Errors
    /// As [`Self::required_function`].
    pub fn linear_map(&self) -> Result<Range<u64>, CommandError> {
        Ok(linear_map(self.required_function("_text")?))
    }

    /// Returns the version in the image.
    ///
    /// # Errors
    /// The image cannot be read, or contains no version.
    pub fn version(&self) -> Result<LinuxVersion, CommandError> {
        let content = shell::read(&self.image)?;
        version_of_image(&content).ok_or_else(|| {
            let missing = io::Error::new(
                io::ErrorKind::InvalidData,
                "it contains no 'Linux version' of 5.10 or newer",
            );
            CommandError::file("find the version of", &self.image, missing)
        })
    }

    /// Returns a message about the counts that this kernel lacks.
    pub fn remark(&self) -> Option<String> {
        let Self { name, uncounted, functions, .. } = self;
        let reason = match functions.as_slice() {
            [] => "no System.map is beside its image",
            _ => "it lacks their functions",
        };
        let uncounted = uncounted.join(", ");
        (!uncounted.is_empty())
            .then(|| format!("no counts on '{name}', because {reason}: {uncounted}"))
    }

    /// Adds what a recipe and its toolchain determine.
    pub fn describe(&mut self, recipe: &Recipe, toolchain: &Toolchain) {
        self.title.clone_from(&recipe.title);
        self.series.clone_from(&recipe.series);
        self.commit = recipe.commit.as_ref().map(|commit| commit.hash.clone());
        self.tree = Some(recipe.tree.to_string());
        self.compiler = Some(toolchain.version.clone());
    }

    /// Returns the kernel of a dry run, which does not exist yet.
    pub fn placeholder(name: String, image: PathBuf) -> Self {
        Self { name, image, image_sha256: "SHA256".to_owned(), ..Self::default() }
    }
}

/// Returns the version in the banner of an image (`linux_banner`).
fn version_of_image(content: &[u8]) -> Option<LinuxVersion> {
    const BANNER: &[u8] = b"Linux version ";
    let starts = content.windows(BANNER.len()).enumerate().filter(|(_, text)| *text == BANNER);
    starts
        .filter_map(|(start, _)| {
            let text = content[start + BANNER.len()..].split(|byte| *byte == b' ').next()?;
            let mut numbers = std::str::from_utf8(text).ok()?.split(['.', '-', '+']);
            format!("{}.{}", numbers.next()?, numbers.next()?).parse().ok()
        })
        .find(|version| *version >= LinuxVersion::OLDEST)
}

/// Name of each count, and the names of its function in different kernel versions.
const COUNTED_FUNCTIONS: [(&str, &[&str]); 7] = [
    ("guest_aborts", &["kvm_handle_guest_abort"]),
    ("page_lookups", &["__gfn_to_pfn_memslot", "__kvm_faultin_pfn"]),
    ("notifier_unmaps", &["kvm_unmap_hva_range", "kvm_unmap_gfn_range"]),
    ("stage2_maps", &["kvm_pgtable_stage2_map"]),
    ("memcache_topups", &["kvm_mmu_topup_memory_cache", "__kvm_mmu_topup_memory_cache"]),
    ("permission_relaxations", &["kvm_pgtable_stage2_relax_perms"]),
    ("timer_ticks", &["update_process_times"]),
];

/// Returns the address of a function in a `System.map`.
pub fn function_address(system_map: &str, name: &str) -> Option<u64> {
    system_map.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        (words.nth(1)? == name).then_some(address)
    })
}

/// Returns the names of counts with the addresses of their functions in a `System.map`.
pub fn counted_functions(system_map: &str) -> Vec<(String, u64)> {
    COUNTED_FUNCTIONS
        .iter()
        .filter_map(|(name, functions)| {
            let mut addresses = functions.iter();
            let address = addresses.find_map(|function| function_address(system_map, function))?;
            Some(((*name).to_owned(), address))
        })
        .collect()
}

fn uncounted(functions: &[(String, u64)]) -> Vec<&'static str> {
    let is_counted = |name: &str| functions.iter().any(|(counted, _)| counted == name);
    COUNTED_FUNCTIONS.iter().map(|(name, _)| *name).filter(|name| !is_counted(name)).collect()
}

/// Returns the addresses of the linear map: the lower half of the kernel's addresses, while the
/// image at `text` is at the start of the upper half (`arch/arm64/include/asm/memory.h`). With
/// 52-bit addresses the lower half begins below that of 48-bit ones.
const fn linear_map(text: u64) -> Range<u64> {
    /// Lowest address of a kernel with 52-bit addresses.
    const LOWEST: u64 = 0xfff0_0000_0000_0000;
    LOWEST..!(u64::MAX >> text.leading_ones())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_linear_map_ends_where_the_half_of_the_image_begins() {
        for (text, end) in [
            (0xffff_8000_1000_0000, 0xffff_8000_0000_0000), // 48 bits, Linux 5.10
            (0xffff_8000_8000_0000, 0xffff_8000_0000_0000), // Linux 7.3
            (0xffff_ffc0_0800_0000, 0xffff_ffc0_0000_0000), // 39 bits
        ] {
            assert_eq!(linear_map(text).end, end, "{text:#x}");
        }
    }

    #[test]
    fn only_an_image_of_a_build_tree_has_files_in_the_top_directory() {
        let tree = tempfile::tempdir().unwrap();
        let mut content = vec![0; 64];
        content[MAGIC_OFFSET..MAGIC_OFFSET + IMAGE_MAGIC.len()].copy_from_slice(IMAGE_MAGIC);
        fs::write(tree.path().join("System.map"), "").unwrap();
        for (folder, has_map) in [("arch/arm64/boot", true), ("saved/x/before", false)] {
            let image = tree.path().join(folder).join("Image");
            fs::create_dir_all(image.parent().unwrap()).unwrap();
            fs::write(&image, &content).unwrap();

            let kernel = Kernel::open("base".to_owned(), &image).unwrap();

            assert_eq!(kernel.system_map.is_some(), has_map, "{folder}");
        }
    }

    #[test]
    fn the_counts_are_those_that_metrics_know() {
        assert_eq!(COUNTED_FUNCTIONS.map(|(name, _)| name), granule_report::FUNCTION_COUNTS);
    }

    #[test]
    fn the_version_is_that_of_the_banner() {
        let image = b"Linux version \0..Linux version %s\0Linux version 6.12.117-rc1 (granule@lab)";

        assert_eq!(version_of_image(image), "6.12".parse().ok());
        assert_eq!(version_of_image(b"Linux version 4.19.1 (x)"), None);
    }

    #[test]
    fn a_function_is_found_by_its_names_in_different_kernels() {
        let old = "ffff800010000000 T _text\nffff80001002eeb0 T kvm_unmap_hva_range\n";
        let new = "ffff80001002eeb8 T kvm_unmap_gfn_range\n\nffff8000ffffffff A\n";

        for (map, address) in [(old, 0xffff_8000_1002_eeb0), (new, 0xffff_8000_1002_eeb8)] {
            let expected = [("notifier_unmaps".to_owned(), address)];
            assert_eq!(counted_functions(map), expected);
        }
    }

    #[test]
    fn the_counts_that_a_kernel_lacks_are_named_with_the_reason() {
        let remark = |map: &str| {
            let functions = counted_functions(map);
            let uncounted = uncounted(&functions);
            Kernel { name: "base".to_owned(), functions, uncounted, ..Kernel::default() }.remark()
        };
        let map: String = COUNTED_FUNCTIONS
            .iter()
            .map(|(_, functions)| format!("ffff800010000000 T {}\n", functions[0]))
            .collect();

        assert_eq!(remark(&map), None);
        let lacks = remark(&map.replace("kvm_pgtable_stage2_map", "stage2_map_inlined")).unwrap();
        assert!(
            lacks.ends_with("'base', because it lacks their functions: stage2_maps"),
            "{lacks}"
        );
        assert!(remark("").unwrap().contains("no System.map is beside its image: guest_aborts, "));
    }
}
