"""The tabletop as MJCF: primitives only, no asset files.

The end-effector target and the goal are mocap bodies, so both live in mjSTATE_INTEGRATION and a snapshot of that vector
is the whole scene. The goal is drawn as a geom because not every MuJoCo renderer draws sites.

Units: metres, radians, kilograms. The table top is the plane z = 0 and the robot base stands at the origin.
"""

import copy
import functools

import mujoco

COLORS = {"red": ".9 .1 .1 1", "blue": ".1 .25 .9 1", "green": ".1 .7 .15 1"}  # of the three cubes, in order
CAMERAS = ("primary", "wrist")
NUM_ARM_JOINTS = 7

_HOME = "0 .1 0 -2.1 0 2.2 -.7853"  # gripper straight down above the table
_STIFFNESS = (1500, 1500, 1200, 1200, 600, 500, 300)  # N m / rad
_DAMPING = (120, 120, 100, 100, 40, 30, 20)  # N m s / rad

# Panda kinematics: name, position, quaternion, joint range, geoms drawn on the link (they do not collide).
_LINKS = (
    (
        "1",
        "0 0 .333",
        "1 0 0 0",
        "-2.8973 2.8973",
        '<geom type="capsule" size=".06" fromto="0 0 -.08 0 0 0" mass="3"/>',
    ),
    (
        "2",
        "0 0 0",
        "1 -1 0 0",
        "-1.7628 1.7628",
        '<geom type="capsule" size=".06" fromto="0 0 -.06 0 0 .06" mass="1"/>'
        '<geom type="capsule" size=".055" fromto="0 0 0 0 -.2 0" mass="2"/>',
    ),
    (
        "3",
        "0 -.316 0",
        "1 1 0 0",
        "-2.8973 2.8973",
        '<geom type="capsule" size=".055" fromto="0 0 -.1 0 0 0" mass="2"/>'
        '<geom type="capsule" size=".05" fromto="0 0 0 .0825 0 0" mass="1"/>',
    ),
    (
        "4",
        ".0825 0 0",
        "1 1 0 0",
        "-3.0718 -.0698",
        '<geom type="capsule" size=".05" fromto="0 0 -.05 0 0 .05" mass="1"/>'
        '<geom type="capsule" size=".05" fromto="0 0 0 -.0825 .1 0" mass="2"/>',
    ),
    (
        "5",
        "-.0825 .384 0",
        "1 -1 0 0",
        "-2.8973 2.8973",
        '<geom type="capsule" size=".05" fromto="0 0 -.24 0 0 -.05" mass="2"/>'
        '<geom type="capsule" size=".045" fromto="0 0 -.05 0 0 .03" mass="1"/>',
    ),
    (
        "6",
        "0 0 0",
        "1 1 0 0",
        "-.0175 3.7525",
        '<geom type="capsule" size=".045" fromto="0 0 -.04 0 0 .04" mass="1"/>'
        '<geom type="capsule" size=".04" fromto="0 0 0 .088 0 0" mass=".5"/>',
    ),
    (
        "7",
        ".088 0 0",
        "1 1 0 0",
        "-2.8973 2.8973",
        '<geom type="cylinder" size=".045 .04" pos="0 0 .06" mass=".7"/>',
    ),
)


def load_model(image_size: int) -> mujoco.MjModel:
    """The scene, the caller's own. The off-screen buffer is ``image_size`` pixels square: a larger one costs time to
    clear."""
    return copy.copy(_compile(image_size))


@functools.cache  # MuJoCo keeps some kilobytes of every compilation for good
def _compile(image_size: int) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(_mjcf(image_size))


def _mjcf(image_size: int) -> str:
    # Shadows and multisampling cost 10 to 80 times the rest of a software-rendered frame, so both are off; 12 slices
    # are enough for capsules at 64 pixels.
    actuators = "".join(
        f'<position name="joint{i + 1}" joint="joint{i + 1}" kp="{kp}" kv="{kv}" inheritrange="1"/>'
        for i, (kp, kv) in enumerate(zip(_STIFFNESS, _DAMPING, strict=True))
    )
    cubes_home = " ".join(f"{x} {y} .02 1 0 0 0" for x, y in _cube_positions())
    return f"""<mujoco model="tabletop">
  <compiler angle="radian" autolimits="true"/>
  <option timestep=".005" integrator="implicitfast" cone="elliptic" impratio="5" iterations="30"/>
  <size memory="2M"/>
  <visual>
    <global offwidth="{image_size}" offheight="{image_size}"/>
    <quality offsamples="0" shadowsize="1024" numslices="12" numstacks="12" numquads="1"/>
    <headlight ambient=".35 .35 .35" diffuse=".3 .3 .3" specular="0 0 0"/>
    <map znear=".008" zfar="8"/>
  </visual>
  <statistic center=".5 0 .2" extent="1.2"/>
  <default>
    <default class="arm">
      <joint armature=".1" damping="1"/>
      <geom contype="0" conaffinity="0" rgba=".9 .9 .92 1"/>
    </default>
    <default class="pad">
      <geom type="box" size=".01 .004 .012" contype="1" conaffinity="1" condim="4" friction="1.5 .02 .0001"
            solref=".01 1" rgba=".2 .2 .2 1"/>
    </default>
  </default>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".75 .82 .9" rgb2=".4 .45 .55" width="32" height="192"/>
    <texture name="floor" type="2d" builtin="checker" rgb1=".55 .55 .55" rgb2=".45 .45 .45" width="64" height="64"/>
    <material name="floor" texture="floor" texrepeat="6 6"/>
  </asset>
  <worldbody>
    <light type="directional" pos="0 0 2" dir="-.3 -.2 -1" castshadow="false" diffuse=".55 .55 .55"
           specular=".1 .1 .1"/>
    <geom name="floor" type="plane" size="2 2 .1" pos="0 0 -.4" material="floor" contype="0" conaffinity="0"/>
    <geom name="table" type="box" size=".35 .45 .2" pos=".5 0 -.2" rgba=".78 .66 .5 1" friction="1 .005 .0001"/>
    <camera name="primary" pos="1.15 0 .65" xyaxes="0 1 0 -.62 0 .78" fovy="45"/>
    <body name="target" mocap="true" pos=".5 0 .3" quat="0 1 0 0"/>
    <body name="goal" mocap="true" pos=".55 .15 .001">
      <geom name="goal" type="cylinder" size=".035 .0015" rgba=".1 .95 .1 .7" contype="0" conaffinity="0"/>
    </body>
    <body name="link0" childclass="arm">
      <geom type="cylinder" size=".08 .05" pos="0 0 .05"/>
      <geom type="capsule" size=".06" fromto="0 0 .1 0 0 .25"/>
      {_arm()}
    </body>
    {_cubes()}
  </worldbody>
  <contact><exclude body1="finger1" body2="finger2"/></contact>
  <tendon>
    <fixed name="split"><joint joint="finger1" coef=".5"/><joint joint="finger2" coef=".5"/></fixed>
  </tendon>
  <equality><joint joint1="finger1" joint2="finger2" solimp=".95 .99 .001" solref=".01 1"/></equality>
  <actuator>
    {actuators}
    <position name="gripper" tendon="split" kp="400" kv="20" ctrlrange="0 .04" forcerange="-40 40"/>
  </actuator>
  <keyframe><key name="home" qpos="{_HOME} .04 .04 {cubes_home}" ctrl="{_HOME} .04"/></keyframe>
</mujoco>"""


def _arm() -> str:
    body = _hand()
    for name, pos, quat, limits, geoms in reversed(_LINKS):
        body = (
            f'<body name="link{name}" pos="{pos}" quat="{quat}" gravcomp="1">'
            f'<joint name="joint{name}" axis="0 0 1" range="{limits}"/>{geoms}{body}</body>'
        )
    return body


def _hand() -> str:
    return f"""<body name="hand" pos="0 0 .107" quat=".9238795 0 0 -.3826834" gravcomp="1">
      <geom type="box" size=".03 .1 .03" pos="0 0 .03" mass=".7"/>
      <site name="ee" pos="0 0 .1034" size=".004" rgba="0 0 0 0"/>
      <camera name="wrist" pos=".07 0 .01" xyaxes="0 -1 0 -.96 0 -.28" fovy="75"/>
      {_finger(1, "1 0 0 0")}{_finger(2, "0 0 0 1")}
    </body>"""


def _finger(number: int, quat: str) -> str:
    return f"""<body name="finger{number}" pos="0 0 .0584" quat="{quat}" gravcomp="1">
      <joint name="finger{number}" type="slide" axis="0 1 0" range="0 .04" armature=".05" damping="5"/>
      <geom type="box" size=".009 .005 .02" pos="0 .013 .018" mass=".02"/>
      <geom name="pad{number}" class="pad" pos="0 .006 .042" mass=".01"/>
    </body>"""


def _cube_positions() -> list[tuple[float, float]]:
    return [(0.45 + 0.06 * i, -0.12 + 0.12 * i) for i in range(len(COLORS))]


def _cubes() -> str:
    return "".join(
        f'<body name="cube{i}" pos="{x} {y} .02"><freejoint name="cube{i}"/><geom name="cube{i}" type="box" '
        f'size=".02 .02 .02" rgba="{rgba}" mass=".06" condim="4" friction="1 .01 .0001" solref=".01 1"/></body>'
        for i, ((x, y), rgba) in enumerate(zip(_cube_positions(), COLORS.values(), strict=True))
    )
