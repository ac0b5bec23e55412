#!/bin/sh
# usage: pkg_config.sh PACKAGE LIBRARY C-COMPILER SOURCE PROGRAM [ARGUMENT...]
# Compiles a program with what pkg-config says of the package, and nothing else; LIBRARY is how the program must find Ferry:
# `libferry.so.VERSION`, or `none`: it is linked in. Then runs the program.
set -eu
package=$1 library=$2 compiler=$3 source=$4 program=$5
shift 5
# shellcheck disable=SC2046 # words of a command line
"$compiler" -std=c99 "$source" -o "$program" $(pkg-config --cflags --libs "$package")
needed=$(readelf -d "$program" | sed -n 's/.*NEEDED.*\[\(libferry.*\)\]/\1/p')
[ "${needed:-none}" = "$library" ] || { echo "needs ${needed:-no library of Ferry}, not $library" && exit 1; }
LD_LIBRARY_PATH=$(pkg-config --variable=libdir "$package") "./$program" "$@"
