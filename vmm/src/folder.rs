// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The folder of a path.

use std::path::Path;

/// Returns the folder of a path, which is the current one if the path is a name alone.
pub fn folder_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_alone_is_in_the_current_folder() {
        let folders = ["name", "folder/name", "/name"].map(|path| folder_of(Path::new(path)));

        assert_eq!(folders, [".", "folder", "/"].map(Path::new));
    }
}
