"""One Bazel test per pytest module."""

def pytest_tests(deps, size = "medium", packages = []):
    """Declares a `py_test` for every `test_*.py` of the calling package and the folders in it.

    Args:
      deps: what the modules import, besides the support code of //tests.
      size: Bazel's size of each test, which sets its time limit.
      packages: packages whose modules `support` holds, too. That of //tests holds all of them.
    """
    runner = "//tests:bazel_pytest.py"
    for module in native.glob(["**/test_*.py"]):
        native.py_test(
            name = module[:-len(".py")],
            size = size,
            srcs = [module, runner],
            main = runner,
            args = ["$(rootpath %s)" % module],
            data = ["//:manual", "//:pyproject.toml"],
            # The workspace and the package share a name: an `__init__.py` made by Bazel at the root of
            # the runfiles would be imported as `tfdp`.
            legacy_create_init = False,
            deps = ["//tests:support"] + deps,
        )

    # What tests import: helpers, conftest files, and other tests.
    native.py_library(
        name = "support",
        testonly = True,
        srcs = native.glob(["**/*.py"], exclude = ["bazel_pytest.py"]),
        deps = [package + ":support" for package in packages],
        visibility = ["//tests:__subpackages__"],
    )
